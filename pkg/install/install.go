// Package install installs the plugin and its network configuration list where the
// container runtime looks for them, and removes them again.
//
// Both are written by rename, so that the runtime never sees half a file, and only
// if their content differs. The agent decides when.
package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"
)

const (
	// Plugin is the file name of the plugin, and its type in the list.
	Plugin = "ebpf-cni"
	// Conflist is the file name of the network configuration list.
	Conflist = "10-ebpf-cni.conflist"
	// Network is the name of the network.
	Network = "ebpf-cni"
)

// List is the content of the network configuration list.
type List struct {
	BPFFS      string
	StateDir   string
	MTU        int
	Attach     string
	Quarantine time.Duration
	// PodCIDRs are this node's. Each becomes a range of addresses.
	PodCIDRs []netip.Prefix
	LogLevel string
	// Portmap says that the portmap plugin is chained right after ours for host ports; else ours serves them.
	Portmap bool
	// Chain are the administrator's plugins, behind ours and portmap.
	Chain []Entry
	// Others is what other programs have put into the list.
	Others Others
	// Newest is the newest version of the CNI specification that all plugins of the list support; empty: the newest that ours does.
	Newest string
}

// The fields are in the order in which they are written to the file.
type (
	plugin struct {
		Type              string       `json:"type"`
		BPFFS             string       `json:"bpffs"`
		StateDir          string       `json:"stateDir"`
		MTU               int          `json:"mtu"`
		Attach            string       `json:"attach"`
		AddressQuarantine string       `json:"addressQuarantine"`
		Capabilities      capabilities `json:"capabilities"`
		Portmap           bool         `json:"portmap,omitempty"`
		Chained           []string     `json:"chained,omitempty"` // types of the administrator's plugins: which ones behind ours the agent has written
		IPAM              ipam         `json:"ipam"`
		LogFile           string       `json:"logFile"`
		LogLevel          string       `json:"logLevel"`
	}
	capabilities struct {
		IPs          bool `json:"ips"`
		MAC          bool `json:"mac"`
		Bandwidth    bool `json:"bandwidth"`
		PortMappings bool `json:"portMappings"`
	}
	ipam struct {
		Type   string    `json:"type"`
		Ranges [][]allot `json:"ranges"`
	}
	allot struct {
		Subnet netip.Prefix `json:"subnet"`
	}
)

// Encode returns the content of the file.
func (l List) Encode() []byte {
	p := plugin{
		Type: Plugin, BPFFS: l.BPFFS, StateDir: l.StateDir, MTU: l.MTU, Attach: l.Attach,
		AddressQuarantine: seconds(l.Quarantine),
		Capabilities:      capabilities{IPs: true, MAC: true, Bandwidth: true, PortMappings: !l.Portmap},
		Portmap:           l.Portmap,
		Chained:           typesOf(l.Chain),
		IPAM:              ipam{Type: "host-local"},
		LogLevel:          l.LogLevel,
	}
	for _, cidr := range l.PodCIDRs {
		p.IPAM.Ranges = append(p.IPAM.Ranges, []allot{{cidr}})
	}
	plugins := []any{p}
	for _, e := range l.chain() {
		plugins = append(plugins, e)
	}
	list := map[string]any{}
	for name, value := range l.Others.Fields {
		list[name] = value
	}
	list["cniVersion"], list["cniVersions"] = offered(l.Newest)
	list["name"], list["plugins"] = Network, plugins
	content, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		panic(err) // plain strings, numbers, valid prefixes, and what was parsed
	}
	return append(content, '\n')
}

// chain is all that stands behind our plugin.
func (l List) chain() []Entry {
	all := slices.Concat(l.Chain, l.Others.Plugins)
	if !l.Portmap {
		return all
	}
	all = slices.DeleteFunc(all, func(e Entry) bool { return TypeOf(e) == Portmap }) // two of them would make the same chains of rules
	return slices.Insert(all, 0, Entry(`{"type": "portmap", "capabilities": {"portMappings": true}}`))
}

// Chained returns the types of the plugins behind ours, in their order.
func (l List) Chained() []string { return typesOf(l.chain()) }

// seconds formats a duration in seconds: 60s rather than 1m0s.
func seconds(d time.Duration) string {
	if d%time.Second != 0 {
		return d.String()
	}
	return strconv.FormatInt(int64(d/time.Second), 10) + "s"
}

// WriteList writes the list into dir, unless it is there with the same content, in whatever form. It reports whether it wrote.
func WriteList(dir string, l List) (bool, error) {
	path, want := filepath.Join(dir, Conflist), l.Encode()
	if have, err := os.ReadFile(path); err == nil && sameJSON(have, want) {
		return false, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return false, fmt.Errorf("write network configuration list: %w", err)
	}
	// The runtime reads *.conf, *.conflist and *.json, so not the temporary file.
	if err := Replace(path, 0o644, bytes.NewReader(want)); err != nil {
		return false, fmt.Errorf("write network configuration list: %w", err)
	}
	_, err := remove(aside(dir)) // its content is in the new one
	return true, err
}

// RemoveList removes the list, also one that was set aside. It reports whether there was one.
func RemoveList(dir string) (bool, error) {
	_, err := remove(aside(dir))
	removed, err2 := remove(filepath.Join(dir, Conflist))
	return removed, errors.Join(err, err2)
}

// WritePlugin installs the plugin at source into dir, unless the same file or
// content is there. It reports whether it wrote.
func WritePlugin(source, dir string) (bool, error) {
	wrote, err := writePlugin(source, filepath.Join(dir, Plugin))
	if err != nil {
		return false, fmt.Errorf("install the plugin: %w", err)
	}
	return wrote, nil
}

func writePlugin(source, path string) (bool, error) {
	from, err := os.Open(source) //nolint:gosec // beside our own executable
	if err != nil {
		return false, err
	}
	defer from.Close()
	same, err := sameContent(from, path)
	if same || err != nil {
		return false, err
	}
	if _, err = from.Seek(0, io.SeekStart); err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = Replace(path, 0o755, from)
	}
	return err == nil, err
}

// RemovePlugin removes the plugin, unless it is the very file at source. It reports
// whether it removed one.
func RemovePlugin(source, dir string) (bool, error) {
	path := filepath.Join(dir, Plugin)
	a, errA := os.Stat(source)
	b, errB := os.Stat(path)
	if errA == nil && errB == nil && os.SameFile(a, b) {
		return false, nil
	}
	return remove(path)
}

func remove(path string) (bool, error) {
	err := errors.Join(removeTemporary(path), os.Remove(path))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func sameContent(from *os.File, path string) (bool, error) {
	info, err := from.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case os.SameFile(info, there):
		return true, nil
	case !there.Mode().IsRegular() || there.Size() != info.Size() || there.Mode().Perm()&0o111 == 0:
		return false, nil
	}
	have, err := os.ReadFile(path)
	if err != nil {
		return false, err
	}
	want, err := io.ReadAll(from)
	return bytes.Equal(have, want), err
}

// temporary is the name of a file while it is written.
func temporary(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
}

// removeTemporary removes what a killed write has left.
func removeTemporary(path string) error {
	if err := os.Remove(temporary(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Replace writes a file beside path and renames it. It does not sync to disk: the
// agent compares the content at every start.
func Replace(path string, mode fs.FileMode, content io.Reader) (err error) {
	name := temporary(path)
	if err := removeTemporary(path); err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode) //nolint:gosec // ours
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(name)
		}
	}()
	_, err = io.Copy(f, content)
	if err == nil {
		err = f.Chmod(mode) // whatever the umask
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(name, path)
	}
	return err
}
