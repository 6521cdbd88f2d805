package main

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

const (
	trueOrFalse = "true or false"
	prefixList  = "prefixes such as 10.0.0.0/8, comma-separated, but not 0.0.0.0/0 or ::/0"
)

func boolean(into *bool, s string) error {
	v, err := strconv.ParseBool(s)
	if err != nil {
		return errTakes
	}
	*into = v
	return nil
}

func number(into *uint32, s string, low, high uint64) error {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n < low || n > high {
		return errTakes
	}
	*into = uint32(n)
	return nil
}

func choose[T any](into *T, s string, from map[string]T) error {
	v, ok := from[s]
	if !ok {
		return errTakes
	}
	*into = v
	return nil
}

func duration(into *time.Duration, s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return errTakes
	}
	*into = d
	return nil
}

func directory(into *string, s string) error {
	if !filepath.IsAbs(s) || strings.ContainsRune(s, 0) {
		return errTakes
	}
	*into = filepath.Clean(s)
	return nil
}

func existingDirectory(into *string, s string) error {
	info, err := os.Stat(s)
	if err != nil {
		return errors.Unwrap(err)
	}
	if !info.IsDir() {
		return errTakes
	}
	*into = s
	return nil
}

// existingFile refuses a file that is not there; what is in it may still change.
func existingFile(into *string, s string, given bool) error {
	if !given {
		return nil
	}
	if s == "" {
		return errTakes
	}
	info, err := os.Stat(s)
	if err != nil {
		return errors.Unwrap(err)
	}
	if info.IsDir() {
		return errTakes
	}
	*into = s
	return nil
}

// prefixes reads a list. What has bits beyond its length is taken for what the
// length leaves, as for podCIDRs, and remembered to be said.
func (o *options) prefixes(into *[]netip.Prefix, s string) error {
	*into = nil
	for _, one := range list(s) {
		p, err := netip.ParsePrefix(one)
		if err != nil {
			return fmt.Errorf("%q is no prefix", one)
		}
		if p.Bits() == 0 || p.Addr().Is4In6() {
			return fmt.Errorf("%s is refused", one)
		}
		if p != p.Masked() {
			o.masked = append(o.masked, p)
		}
		*into = append(*into, p.Masked())
	}
	return nil
}

// list splits at commas and passes over what is empty.
func list(s string) []string {
	var out []string
	for one := range strings.SplitSeq(s, ",") {
		if one = strings.TrimSpace(one); one != "" {
			out = append(out, one)
		}
	}
	return out
}

func listener(into *string, s string) error {
	if s == "" {
		*into = ""
		return nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return errTakes
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n > 65535 {
		return errTakes
	}
	if host != "" && host != "localhost" {
		if _, err := netip.ParseAddr(host); err != nil {
			return errTakes
		}
	}
	*into = s
	return nil
}

// nodeName is completed by what only complete knows.
func nodeName(o *options, s string, given bool) error {
	if given && (s == "" || len(s) > 253 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == '/' || r == 0x7f })) {
		return errTakes
	}
	o.config.Node = s
	return nil
}

func uplinks(o *options, s string, given bool) error {
	o.config.Uplinks = list(s)
	for _, name := range o.config.Uplinks {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return fmt.Errorf("there is no interface %q", name)
		}
		if i.Flags&net.FlagLoopback != 0 || len(i.HardwareAddr) != 6 {
			return fmt.Errorf("%s is not an Ethernet interface", name)
		}
	}
	if given && len(o.config.Uplinks) == 0 {
		return errTakes
	}
	return nil
}

func kubeProxy(o *options, s string, _ bool) error {
	return choose(&o.config.KubeProxy, s, map[string]agent.KubeProxyMode{
		"auto": agent.KubeProxyAuto, "on": agent.KubeProxyOn, "off": agent.KubeProxyOff,
	})
}

func portmap(o *options, s string, _ bool) error {
	return choose(&o.config.Portmap, s, map[string]agent.PortmapMode{
		"auto": agent.PortmapAuto, "on": agent.PortmapOn, "off": agent.PortmapOff,
	})
}

func snatPorts(o *options, s string, _ bool) error {
	low, high, ok := strings.Cut(s, "-")
	var l, h uint32
	if !ok || number(&l, low, 1, 65535) != nil || number(&h, high, 1, 65535) != nil || l > h {
		return errTakes
	}
	o.config.SnatLow, o.config.SnatHigh = uint16(l), uint16(h)
	return nil
}

func mtu(o *options, s string, _ bool) error {
	var n uint32
	if err := number(&n, s, 0, 65535); err != nil || n != 0 && n < 576 {
		return errTakes
	}
	o.config.MTU = int(n)
	return nil
}

func mark(o *options, s string, _ bool) error {
	n, err := strconv.ParseUint(s, 0, 32)
	if err != nil || bits.OnesCount64(n) != 1 || n == 0x4000 || n == 0x8000 {
		return errTakes
	}
	o.config.Mark = uint32(n)
	return nil
}

// complete adds what is not in the flags alone.
func (o *options) complete(e env) error {
	o.config.Version = version
	if o.config.Node == "" {
		o.config.Node, _ = e.lookup("NODE_NAME")
	}
	if o.config.Node == "" {
		name, err := e.hostname()
		if err != nil || name == "" {
			return usageError{errors.New("--node-name: not given, and this host has no name; takes the name of a Node")}
		}
		o.config.Node = strings.ToLower(name) // as the kubelet does
	}
	if o.config.Portmap == agent.PortmapOn && o.config.Bin == "" {
		return usageError{errors.New(`--portmap "on": --cni-bin-dir is empty, where the portmap plugin is looked for; takes auto or off then`)}
	}
	if err := o.findPlugin(e); err != nil {
		return err
	}
	if o.config.NodesFile != "" {
		return nil
	}
	var err error
	o.config.API, err = agent.LoadAPI(o.kubeconfig)
	if errors.Is(err, agent.ErrNotInCluster) {
		return usageError{errors.New("--kubeconfig: not given, and this is no pod of a cluster; takes a kubeconfig file (or give --nodes-file)")}
	}
	if err != nil && o.kubeconfig != "" {
		return usageError{fmt.Errorf("--kubeconfig %q: %s; takes a kubeconfig file", o.kubeconfig, readable(err, o.kubeconfig))}
	}
	return err
}

// readable takes out of client-go's error on a kubeconfig what was said already
// and what is only of use to those who know its sources.
func readable(err error, path string) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	line, _, _ = strings.Cut(line, " into Go ")
	return strings.TrimPrefix(line, fmt.Sprintf("error loading config file %q: ", path))
}

// dismiss looks for settings of features that this version does not have. What a manifest of before has shipped is no
// reason not to start; anything else was meant.
func (o *options) dismiss(lookup func(string) (string, bool)) error {
	shipped := later()
	for _, name := range slices.Sorted(maps.Keys(shipped)) {
		switch value, _ := lookup(variable(name)); value {
		case "":
		case shipped[name]:
			o.dismissed = append(o.dismissed, variable(name))
		default:
			return notYet(fmt.Sprintf("$%s %q", variable(name), value))
		}
	}
	return nil
}

func notYet(setting string) error {
	return fmt.Errorf("%s: this version does not have what that sets, it carries IPv4 with direct routing; leave it out", setting)
}

// remark logs what the flags leave undone, and what is not done to the letter.
func (o *options) remark() {
	for _, p := range o.masked {
		o.config.Log.Warn("a prefix of a flag has bits beyond its length", "given", p.String(), "taken", p.Masked().String())
	}
	if len(o.dismissed) > 0 {
		o.config.Log.Warn("settings of features that this version does not have are ignored", "variables", o.dismissed)
	}
	if o.kubeconfig != "" && o.config.NodesFile != "" {
		o.config.Log.Warn("--kubeconfig is not used: --nodes-file is given", "file", o.config.NodesFile)
	}
}
