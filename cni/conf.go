package cni

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

const (
	defaultBPFFS    = "/sys/fs/bpf/ebpf-cni"
	defaultStateDir = "/run/ebpf-cni"
	defaultMTU      = 1500
	maxMTU          = 65535

	gcKey = "cni.dev/valid-attachments"
)

// conf is the network configuration of one call, checked.
type conf struct {
	version    string
	network    string
	pins       bpffs.Dir
	stateDir   string
	mtu        int
	attach     attach.Mode
	quarantine time.Duration
	logFile    string
	logLevel   slog.Level
	ipamType   string
	dns        types.DNS
	portmap    bool // the portmap plugin is chained after ours, for host ports
	// defaultRoutes are given to pods also beside other routes.
	defaultRoutes bool
	unknown       []string

	requested // by readRuntime

	fields fields // for those that only some operations decode
	raw    []byte
}

// requested is what the runtime asks for by capabilities, beside addresses.
type requested struct {
	mac       net.HardwareAddr // nil: random
	bandwidth bool
	ports     []portMapping
}

type fields map[string]json.RawMessage

// known are the fields that have a meaning here, to libcni or to other plugins of the list.
var known = []string{
	"cniVersion", "cniVersions", "name", "type", "bpffs", "stateDir", "mtu", "attach", "addressQuarantine",
	"capabilities", "ipam", "logFile", "logLevel", "dns", "runtimeConfig", "prevResult", "args", gcKey,
	"cni.dev/attachments", "disableCheck", "disableGC", "portmap", "chained",
	"isDefaultGateway", "ipMasq", "isGateway", "hairpinMode",
}

// parseConf parses what every operation needs. Its errors have codes for the runtime.
func parseConf(stdin []byte) (*conf, error) {
	c := &conf{
		pins: defaultBPFFS, stateDir: defaultStateDir, mtu: defaultMTU, quarantine: ipam.DefaultQuarantine, raw: stdin,
	}
	if err := json.Unmarshal(stdin, &c.fields); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration is not a JSON object", err.Error())
	}
	for name := range c.fields {
		if !slices.Contains(known, name) {
			c.unknown = append(c.unknown, name)
		}
	}
	for _, read := range []func() error{c.readNames, c.readPaths, c.readValues, c.readLog, c.readIPAMType, c.readBridge} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	slices.Sort(c.unknown)
	return c, nil
}

// fieldError is error 7: a field of the network configuration has a wrong value.
func fieldError(field, reason string) error {
	return types.NewError(types.ErrInvalidNetworkConfig, "network configuration, field "+field+": "+reason, "")
}

// decode decodes a field; if it is absent or null, the default stays.
func (f fields) decode(name, what string, into any) error { return f.decodeIn("", name, what, into) }

// decodeIn is decode for a field of the object at that path, such as "runtimeConfig.".
func (f fields) decodeIn(path, name, what string, into any) error {
	raw, ok := f[name]
	if !ok || string(raw) == "null" {
		return nil
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fieldError(path+name, fmt.Sprintf("%.100s: must be %s", raw, what))
	}
	return nil
}

func (c *conf) readNames() error {
	if err := c.fields.decode("cniVersion", "a version such as \"1.0.0\"", &c.version); err != nil {
		return err
	}
	if err := c.fields.decode("name", "a string", &c.network); err != nil {
		return err
	}
	if _, err := ipam.Open("/", c.network, ipam.Options{}); err != nil { // it is a directory's name there
		return fieldError("name", err.Error())
	}
	return nil
}

func (c *conf) readPaths() error {
	for _, f := range []struct {
		name string
		into *string
	}{{"bpffs", (*string)(&c.pins)}, {"stateDir", &c.stateDir}, {"logFile", &c.logFile}} {
		var dir string
		if err := c.fields.decode(f.name, "an absolute path", &dir); err != nil {
			return err
		}
		if dir == "" {
			continue
		}
		if !filepath.IsAbs(dir) || strings.ContainsRune(dir, 0) {
			return fieldError(f.name, fmt.Sprintf("%.100q: must be an absolute path", dir))
		}
		*f.into = filepath.Clean(dir)
	}
	return nil
}

func (c *conf) readValues() error {
	if err := c.fields.decode("mtu", "a number", &c.mtu); err != nil {
		return err
	}
	if c.mtu == 0 {
		c.mtu = defaultMTU
	}
	if least := endpoint.MinMTU(netip.IPv4Unspecified()); c.mtu < least || c.mtu > maxMTU {
		return fieldError("mtu", fmt.Sprintf("%d: must be from %d to %d", c.mtu, least, maxMTU))
	}
	var mode, rest string
	if err := c.fields.decode("attach", "auto, tcx or clsact", &mode); err != nil {
		return err
	}
	var err error
	if c.attach, err = attach.ParseMode(mode); err != nil {
		return fieldError("attach", err.Error())
	}
	if err := c.fields.decode("addressQuarantine", "a duration such as \"60s\"", &rest); err != nil {
		return err
	}
	if rest != "" {
		if c.quarantine, err = time.ParseDuration(rest); err != nil || c.quarantine < 0 {
			return fieldError("addressQuarantine", fmt.Sprintf("%.100q: must be a duration such as \"60s\"", rest))
		}
	}
	if err := c.fields.decode("portmap", "true or false", &c.portmap); err != nil {
		return err
	}
	return c.fields.decode("dns", "an object of nameservers, domain, search and options", &c.dns)
}

func (c *conf) readLog() error {
	var level string
	if err := c.fields.decode("logLevel", "debug, info, warn or error", &level); err != nil {
		return err
	}
	levels := map[string]slog.Level{
		"": slog.LevelInfo, "debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
	}
	l, ok := levels[level]
	if !ok {
		return fieldError("logLevel", fmt.Sprintf("%.100q: must be debug, info, warn or error", level))
	}
	c.logLevel = l
	return nil
}

func (c *conf) readIPAMType() error {
	var section struct {
		Type string `json:"type"`
	}
	if err := c.fields.decode("ipam", "an object with a type", &section); err != nil {
		return err
	}
	// The type of another plugin is the name of a file in CNI_PATH.
	if section.Type == "" || section.Type != filepath.Base(section.Type) || strings.HasPrefix(section.Type, ".") {
		return fieldError("ipam.type", fmt.Sprintf("%.100q: must be the name of an ipam plugin, such as host-local", section.Type))
	}
	c.ipamType = section.Type
	return nil
}

// readRuntime reads what only ADD needs: no DEL fails because of it.
func (c *conf) readRuntime() error {
	var runtime fields
	if err := c.fields.decode("runtimeConfig", "an object", &runtime); err != nil {
		return err
	}
	if raw, ok := runtime["bandwidth"]; ok && string(raw) != "null" && string(raw) != "{}" {
		c.bandwidth = true
	}
	if err := c.readPortMappings(runtime); err != nil {
		return err
	}
	var mac string
	if err := runtime.decodeIn(runtimePath, "mac", "an Ethernet address in text", &mac); err != nil || mac == "" {
		return err
	}
	parsed, err := net.ParseMAC(mac)
	if err != nil || len(parsed) != 6 || parsed[0]&1 != 0 || isZero(parsed) {
		return fieldError("runtimeConfig.mac", fmt.Sprintf("%.100q: must be the unicast Ethernet address of an interface", mac))
	}
	c.mac = parsed
	return nil
}

func isZero(b []byte) bool { return !slices.ContainsFunc(b, func(x byte) bool { return x != 0 }) }

// hostLocal reports whether addresses are allocated in process.
func (c *conf) hostLocal() bool { return c.ipamType == endpoint.HostLocal }

// macs chooses Ethernet addresses for both ends, unless the pod's was requested. They are set when the link is created,
// which also keeps systemd from choosing others.
func macs(pod net.HardwareAddr) (host, chosen net.HardwareAddr, err error) {
	var b [12]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, nil, fmt.Errorf("choose Ethernet addresses: %w", err)
	}
	for _, first := range []int{0, 6} {
		b[first] = b[first]&^1 | 2 // unicast, locally administered
	}
	if pod == nil {
		pod = b[6:]
	}
	return b[:6], pod, nil
}

// parseIPAM parses what host-local needs to allocate addresses, for pods' interfaces of that name.
func (c *conf) parseIPAM(args, ifname string) (ipam.Config, error) {
	parsed, err := ipam.Parse(c.raw, args)
	if e, ok := errors.AsType[*ipam.FieldError](err); ok {
		return parsed, fieldError(e.Field, e.Reason)
	}
	if err != nil {
		return parsed, types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	for _, set := range parsed.Ranges {
		if err := c.checkMTU(ifname, toAddr(set[0].Subnet.IP)); err != nil { // a set is of one family
			return parsed, err
		}
	}
	return parsed, nil
}

// checkMTU refuses an MTU that is too small for the address's family.
func (c *conf) checkMTU(ifname string, a netip.Addr) error {
	if least := endpoint.MinMTU(a); c.mtu < least {
		return fieldError("mtu", fmt.Sprintf("%d: too small for %s on interface %s, which needs at least %d: raise it, or allocate no such addresses",
			c.mtu, wire.FamilyOf(a).Name(), ifname, least))
	}
	return nil
}

// prevResult returns the field prevResult, nil when there is none.
func (c *conf) prevResult() (*current.Result, error) {
	n := &types.PluginConf{CNIVersion: c.version}
	if err := c.fields.decode("prevResult", "a result", &n.RawPrevResult); err != nil {
		return nil, err
	}
	if n.RawPrevResult == nil {
		return nil, nil
	}
	if err := version.ParsePrevResult(n); err != nil {
		return nil, fieldError("prevResult", err.Error())
	}
	r, err := toCurrent(n.PrevResult)
	if err != nil {
		return nil, fieldError("prevResult", err.Error())
	}
	return r, nil
}

// validAttachments returns the list of attachments that GC has to keep. A missing or invalid list is an error, since
// everything would be released. null is an empty list: libcni writes it for a runtime that has no attachments, and
// leaves the key out for one that passes no list.
func (c *conf) validAttachments() (map[endpoint.ID]bool, error) {
	raw, ok := c.fields[gcKey]
	if !ok {
		return nil, fieldError(gcKey, "is missing: nothing is released without the list of what is still attached")
	}
	var list []types.GCAttachment
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fieldError(gcKey, "must be a list of objects with containerID and ifname: "+err.Error())
	}
	valid := map[endpoint.ID]bool{}
	for i, a := range list {
		id := endpoint.ID{ContainerID: a.ContainerID, IfName: a.IfName}
		if err := id.Validate(); err != nil {
			return nil, fieldError(fmt.Sprintf("%s[%d]", gcKey, i), err.Error())
		}
		valid[id] = true
	}
	return valid, nil
}
