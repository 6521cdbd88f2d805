package cni

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// runtimePath is where the fields of capabilities are.
const runtimePath = "runtimeConfig."

// portMapping is one of the capability portMappings, checked. Its address is invalid if any of the node's may be asked.
type portMapping struct {
	field string // of the network configuration, such as "runtimeConfig.portMappings[1]"
	endpoint.HostPort
}

// readPortMappings reads the host ports that the runtime asks for. Those of the portmap plugin are not ours.
func (c *conf) readPortMappings(runtime fields) error {
	var list []json.RawMessage
	if err := runtime.decodeIn(runtimePath, "portMappings", "a list of objects", &list); err != nil || c.portmap {
		return err
	}
	for i, raw := range list {
		m := portMapping{field: fmt.Sprintf("%sportMappings[%d]", runtimePath, i)}
		var f fields
		if err := json.Unmarshal(raw, &f); err != nil {
			return fieldError(m.field, fmt.Sprintf("%.100s: must be an object", raw))
		}
		if err := m.read(f.folded("hostPort", "containerPort", "protocol", "hostIP")); err != nil {
			return err
		}
		if m.Port != 0 {
			c.ports = append(c.ports, m)
		}
	}
	return nil
}

// folded are the fields with these names, in whichever case: containerd writes HostPort.
func (f fields) folded(names ...string) fields {
	out := fields{}
	for written, raw := range f {
		if i := slices.IndexFunc(names, func(name string) bool { return strings.EqualFold(name, written) }); i >= 0 {
			out[names[i]] = raw
		}
	}
	return out
}

// read reads a mapping. With host port 0, which asks for none, the rest does not matter.
func (m *portMapping) read(f fields) error {
	path := m.field + "."
	if err := f.decodeIn(path, "hostPort", "a port from 0 to 65535", &m.Port); err != nil || m.Port == 0 {
		return err
	}
	if err := f.decodeIn(path, "containerPort", "a port from 1 to 65535", &m.PodPort); err != nil {
		return err
	}
	if m.PodPort == 0 {
		return fieldError(path+"containerPort", "must be a port from 1 to 65535")
	}
	m.Protocol = "tcp"
	if err := f.decodeIn(path, "protocol", "tcp, udp or sctp", &m.Protocol); err != nil {
		return err
	}
	given := m.Protocol
	m.Protocol = strings.ToLower(given)
	if m.Protocol == "" {
		m.Protocol = "tcp"
	}
	if _, known := endpoint.HostPortProtocols[m.Protocol]; !known {
		return fieldError(path+"protocol", fmt.Sprintf("%.100q: must be tcp, udp or sctp", given))
	}
	if m.Protocol == "sctp" && m.Port != m.PodPort {
		return fieldError(path+"hostPort", fmt.Sprintf("%d: must be the containerPort, %d, because SCTP's checksum covers the port", m.Port, m.PodPort))
	}
	return m.readHostIP(f, path)
}

func (m *portMapping) readHostIP(f fields, path string) error {
	var text string
	if err := f.decodeIn(path, "hostIP", "an address", &text); err != nil || text == "" {
		return err
	}
	a, err := netip.ParseAddr(text)
	a = a.Unmap()
	if err != nil || a.Zone() != "" || a.IsMulticast() || a.Is6() && a.IsLinkLocalUnicast() {
		return fieldError(path+"hostIP", fmt.Sprintf("%.100q: must be an address of the node, 0.0.0.0 or ::, and none of a link alone", text))
	}
	// A resolver's stub has another one, bound to the interface too, where programs can't see it.
	if a.IsLoopback() && a != netip.AddrFrom4([4]byte{127, 0, 0, 1}) && a != netip.IPv6Loopback() {
		return fieldError(path+"hostIP", fmt.Sprintf("%s: must be 127.0.0.1 or ::1, of loopback", a))
	}
	m.Address = a
	return nil
}

// hosts are the addresses of the node that a pod with these answers at: none where it has none of the family that is asked for.
func (m portMapping) hosts(addresses []netip.Addr) (hosts []netip.Addr) {
	for _, a := range addresses {
		family := wire.FamilyOf(a)
		switch {
		case !m.Address.IsValid():
			hosts = append(hosts, [wire.Families]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[family])
		case wire.FamilyOf(m.Address) == family:
			return []netip.Addr{m.Address}
		}
	}
	return hosts
}

// hostPorts are those that are asked for, for a pod with these addresses.
func (c *conf) hostPorts(addresses []netip.Addr) (all []endpoint.HostPort, err error) {
	have := endpoint.NewHostPorts()
	for _, m := range c.ports {
		for _, host := range m.hosts(addresses) {
			p := m.HostPort
			p.Address = host
			met := have.Meeting(p.Key())
			if i := slices.IndexFunc(met, func(o endpoint.HostPort) bool { return o.PodPort != p.PodPort }); i >= 0 {
				return nil, fieldError(m.field+".hostPort", fmt.Sprintf("%d: %s leads to port %d of the pod already", m.Port, met[i], met[i].PodPort))
			}
			if !have.Has(p) {
				have.Add(p)
				all = append(all, p)
			}
		}
	}
	slices.SortFunc(all, func(a, b endpoint.HostPort) int {
		return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return all, nil
}

// tellUnanswered logs which host ports nobody will answer, as with portmap: the pod has no address of that family.
func (a *addition) tellUnanswered(addresses []netip.Addr) {
	for _, m := range a.ports {
		if len(m.hosts(addresses)) == 0 {
			a.log.Warn("the pod has no address of the hostIP's family, its host port stays closed", "field", m.field, "hostIP", m.Address)
		}
	}
}

// hostPortPoll is how often is looked whether the programs serve host ports.
const hostPortPoll = 50 * time.Millisecond

// awaitHostPorts waits, without a lock, until the programs serve host ports: the first pod of a node that asks for one has
// the agent load others.
func (a *addition) awaitHostPorts() error {
	if len(a.ports) == 0 {
		return nil
	}
	if err := endpoint.AskForHostPorts(a.stateDir); err != nil {
		return err
	}
	for began := time.Now(); ; time.Sleep(hostPortPoll) {
		serve, err := a.work.ServesHostPorts()
		if serve || err != nil {
			return err
		}
		if waited := time.Since(began); waited >= a.hostPortWait {
			return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("the pod asks for a host port, the first one of this node, "+
				"for which the agent has to load its programs anew; it has not within %s: %s", waited.Round(time.Second), a.agentState()), "")
		}
	}
}

// agentState says what to do where the agent does not do its part.
func (c *call) agentState() string {
	runs, err := bpffs.Held(filepath.Join(c.stateDir, bpffs.AgentLock))
	switch {
	case err != nil:
		return "whether it runs is not known: " + err.Error()
	case runs:
		return "it runs, and its log says why"
	}
	return "no agent runs with the state directory " + c.stateDir + ": start it"
}
