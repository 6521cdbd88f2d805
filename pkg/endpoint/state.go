package endpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// HaveRoom fails while the file system of the state directory is full: no ADD could write what it has to.
func HaveRoom(stateDir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(stateDir, &fs); err != nil {
		return fmt.Errorf("ask for room in %s: %w", stateDir, err)
	}
	if fs.Blocks != 0 && fs.Bavail == 0 || fs.Files != 0 && fs.Ffree == 0 { // without a limit there are none at all
		return fmt.Errorf("the file system of %s is full, so no pod can be added: make room there", stateDir)
	}
	return nil
}

// ID names an attachment: a container's interface.
type ID struct {
	ContainerID string `json:"container_id"`
	IfName      string `json:"ifname"`
}

// String is "container:interface".
func (id ID) String() string { return id.ContainerID + ":" + id.IfName }

// Validate refuses an ID that must not become part of a path or of a link's name.
func (id ID) Validate() error {
	if err := utils.ValidateContainerID(id.ContainerID); err != nil {
		return fmt.Errorf("container id %.64q: %s", id.ContainerID, err.Msg)
	}
	if err := utils.ValidateInterfaceName(id.IfName); err != nil {
		return fmt.Errorf("interface name %.64q: %s", id.IfName, err.Error())
	}
	for _, r := range id.IfName {
		if r < ' ' || r == 0x7f {
			return fmt.Errorf("interface name %q: has a control character", id.IfName)
		}
	}
	return nil
}

// HostLinkPrefix begins the name of each host-side veth.
const HostLinkPrefix = "ec"

// HostLinkName is the name of the host-side veth.
func (id ID) HostLinkName() string {
	sum := sha256.Sum256([]byte(id.ContainerID + "/" + id.IfName))
	return HostLinkPrefix + hex.EncodeToString(sum[:])[:11]
}

var hostLinkName = regexp.MustCompile(`^ec[0-9a-f]{11}$`)

// IsHostLinkName reports whether the name has the form of our host-side links.
func IsHostLinkName(name string) bool { return hostLinkName.MatchString(name) }

// Endpoint is the content of the state file.
type Endpoint struct {
	ID
	// Network is the name in the network configuration.
	Network string `json:"network"`
	// NetNS is the path of the pod's network namespace, NetNSInode its inode, which tells it from a later one.
	NetNS      string `json:"netns"`
	NetNSInode uint64 `json:"netns_inode"`

	HostName  string   `json:"host_ifname"`
	HostIndex int      `json:"host_ifindex"`
	HostMAC   wire.MAC `json:"host_mac"`
	// PodMAC is the Ethernet address of the pod's interface, MACChanged says that it is no longer that of ADD, see Follow.
	PodMAC     wire.MAC `json:"pod_mac"`
	MACChanged bool     `json:"mac_changed,omitempty"`
	MTU        int      `json:"mtu"`
	// Addresses of the pod, at most one of each family.
	Addresses []netip.Addr `json:"addresses"`
	// HostPorts are the node's ports that lead to the pod.
	HostPorts []HostPort `json:"host_ports,omitempty"`
	// Portmap says that the portmap plugin was chained when ADD ran, and may have made rules for the pod.
	Portmap bool `json:"portmap,omitempty"`
	// SourceRules says that the pod had routes over other interfaces when ADD ran, so that it has routing rules for these addresses.
	SourceRules bool `json:"source_rules,omitempty"`
	// IPAM is the ipam type; only host-local's addresses are in our store.
	IPAM string `json:"ipam"`
	// IPAMConf is the network configuration that another ipam plugin was called with, and has to be called with to free
	// the addresses. An earlier version did not write it.
	IPAMConf json.RawMessage `json:"ipam_conf,omitempty"`
	// Pod is the pod's namespace and name, "shop/web", PodUID its uid in Kubernetes, as far as the runtime has passed them
	// and CheckPod has accepted. They are for people: nothing depends on them.
	Pod    string `json:"pod,omitempty"`
	PodUID string `json:"pod_uid,omitempty"`
	// Created is when ADD made the endpoint.
	Created time.Time `json:"created"`
	// Releasing is set once the release has begun: nothing of the endpoint may be repaired any more. It is in the file's
	// permissions, see markReleasing; an earlier version wrote it into the file.
	Releasing bool `json:"releasing,omitempty"`
	// Result is the result of ADD, for an ADD that is repeated.
	Result json.RawMessage `json:"result,omitempty"`
}

// ErrUnreadable is returned (wrapped) for a state file with content that is not valid, but not for one that could not be
// read.
var ErrUnreadable = errors.New("not the state of an endpoint")

// Dir is the directory of the state files.
func Dir(stateDir string) string { return filepath.Join(stateDir, "endpoints") }

const (
	suffix     = ".json"
	tempSuffix = ".tmp"
)

func path(stateDir string, id ID) string { return filepath.Join(Dir(stateDir), fileName(id)) }

const (
	// longestPlain is the length of the longest container id that is part of the file's name, which file systems limit
	// to 255 bytes. The specification has no limit.
	longestPlain = 200
	// linkMark begins the name of a file that has the host-side link's name instead of a longer id. No id begins with it.
	linkMark = "="
)

func fileName(id ID) string {
	if len(id.ContainerID) > longestPlain {
		return linkMark + id.HostLinkName() + suffix
	}
	return id.String() + suffix
}

// linkOfFile returns the name of the endpoint's link by the name of its state file, whose content may be unreadable.
func linkOfFile(name string) (string, bool) {
	base, ok := strings.CutSuffix(name, suffix)
	if !ok {
		return "", false
	}
	if link, ok := strings.CutPrefix(base, linkMark); ok {
		return link, IsHostLinkName(link)
	}
	container, ifname, ok := strings.Cut(base, ":")
	id := ID{container, ifname}
	return id.HostLinkName(), ok && id.Validate() == nil
}

// Write writes the endpoint's file, by rename: a reader sees the old content or the new. Nothing is synced to disk, since
// no endpoint survives a boot.
func Write(stateDir string, e Endpoint) error {
	content, err := json.MarshalIndent(e, "", "  ")
	if err == nil {
		err = e.Validate()
	}
	if err == nil {
		err = os.MkdirAll(Dir(stateDir), 0o700)
	}
	if err == nil {
		err = replaceFile(path(stateDir, e.ID), append(content, '\n'))
	}
	if err != nil {
		return fmt.Errorf("write endpoint state: %w", err)
	}
	return nil
}

func replaceFile(name string, content []byte) (err error) {
	temp := name + tempSuffix // one per endpoint, so that one left by a killed process is overwritten or found
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temp)
		}
	}()
	_, err = f.Write(content)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return os.Rename(temp, name)
}

// Read returns an endpoint's state. The error matches fs.ErrNotExist when there is none.
func Read(stateDir string, id ID) (Endpoint, error) {
	if err := id.Validate(); err != nil {
		return Endpoint{}, fmt.Errorf("read endpoint state: %w", err)
	}
	e, err := readFile(path(stateDir, id))
	if err == nil && e.ID != id { // two long ids with one link name
		return Endpoint{}, fmt.Errorf("read endpoint state %s: %w: it is that of %q", path(stateDir, id), ErrUnreadable, e.ID)
	}
	return e, err
}

func readFile(name string) (Endpoint, error) {
	f, err := os.Open(name)
	if err != nil {
		return Endpoint{}, fmt.Errorf("read endpoint state: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	var content []byte
	if err == nil {
		content, err = io.ReadAll(f)
	}
	if err != nil {
		return Endpoint{}, fmt.Errorf("read endpoint state: %w", err)
	}
	e, err := decode(content)
	if err == nil && fileName(e.ID) != filepath.Base(name) {
		err = fmt.Errorf("it is that of %q", e.ID)
	}
	if err != nil {
		return Endpoint{}, fmt.Errorf("read endpoint state %s: %w: %w", name, ErrUnreadable, err)
	}
	e.Releasing = e.Releasing || info.Mode()&writable == 0
	return e, nil
}

// writable is the permission that a state file has until the endpoint's release begins.
const writable = 0o200

// markReleasing notes that an endpoint's release has begun. Permissions can be changed even on a full file system, on
// which the release makes room.
func markReleasing(stateDir string, id ID) error {
	err := os.Chmod(path(stateDir, id), 0o600&^writable)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("mark endpoint state: %w", err)
	}
	return nil
}

func decode(content []byte) (Endpoint, error) {
	var e Endpoint
	if err := json.Unmarshal(content, &e); err != nil {
		return Endpoint{}, err
	}
	if err := e.Validate(); err != nil {
		return Endpoint{}, err
	}
	if e.HostIndex < 0 {
		return Endpoint{}, fmt.Errorf("host_ifindex %d is negative", e.HostIndex)
	}
	for _, a := range e.Addresses {
		if !a.IsValid() || a.Zone() != "" {
			return Endpoint{}, fmt.Errorf("address %q is not an address", a)
		}
	}
	for _, h := range e.HostPorts {
		if err := h.validate(); err != nil {
			return Endpoint{}, err
		}
	}
	e.Pod, e.PodUID, _ = CheckPod(e.Pod, e.PodUID) // an earlier version wrote whatever it was given
	return e, nil
}

// List returns all endpoints. Files that can't be read are left out and named in the error, which comes with the others.
// Without a state directory the list is empty.
func List(stateDir string) ([]Endpoint, error) {
	files, err := os.ReadDir(Dir(stateDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list endpoints: %w", err)
	}
	var (
		list   []Endpoint
		broken []error
	)
	for _, f := range files {
		if _, ok := linkOfFile(f.Name()); !ok {
			continue
		}
		e, err := readFile(filepath.Join(Dir(stateDir), f.Name()))
		switch {
		case errors.Is(err, fs.ErrNotExist): // released meanwhile
		case err != nil:
			broken = append(broken, err)
		default:
			list = append(list, e)
		}
	}
	return list, errors.Join(broken...)
}

// Remove removes an endpoint's file, and what a killed Write has left. A missing file is no error.
func Remove(stateDir string, id ID) error {
	if err := id.Validate(); err != nil {
		return fmt.Errorf("remove endpoint state: %w", err)
	}
	name := path(stateDir, id)
	for _, n := range []string{name + tempSuffix, name} {
		if err := os.Remove(n); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove endpoint state: %w", err)
		}
	}
	return nil
}
