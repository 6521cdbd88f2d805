package agent

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// ephemeralName is what administrators call ephemeralPorts.
const ephemeralName = "net.ipv4.ip_local_port_range"

const (
	// leastEphemeral is how many ephemeral ports masquerading, NodePorts and host ports leave to the host's own sockets in any case:
	// those, or half of them if that is more.
	leastEphemeral = 8192
	// fewSnat is the number of ports to masquerade to below which a node has few, where all may be used that can be had.
	fewSnat = 8192
	// scarceEphemeral is the number of free ephemeral ports below which a node has too few.
	scarceEphemeral = 1024
)

// PortRange are the ports from Low to High.
type PortRange struct{ Low, High uint16 }

func (r PortRange) size() int { return int(r.High) - int(r.Low) + 1 }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.Low, r.High) }

func (r PortRange) ports() (p ports) {
	p.add(r.Low, r.High)
	return p
}

// constant is the range as programs have it.
func (r PortRange) constant() config.PortRange {
	return config.PortRange{First: uint32(r.Low), Count: uint32(r.size())}
}

var (
	// usualSnat are the ports that are masqueraded to unless the administrator says which: all that need no privilege.
	usualSnat = PortRange{1024, 65535}
	// usualNodePorts are those that an API server gives to NodePorts unless its --service-node-port-range says otherwise.
	usualNodePorts = PortRange{30000, 32767}
	// privilegedSnat are for flows that begin below 1024, with --snat-ports auto. A node's management controller may take packets to the ports
	// 623 and 664 off the wire, and 853 is that of DNS over TLS. Kernels open NFS mounts from 665 to 1023.
	privilegedSnat = PortRange{665, 852}
	// olderSnat were those of builds that do not note in given_ports which they give.
	olderSnat = PortRange{49152, 65535}
)

// snatPorts are the ports that masqueraded flows are to get, as far as the host can spare them.
func (c Config) snatPorts() (p ports) {
	if len(c.SnatPorts) == 0 {
		return usualSnat.ports()
	}
	for _, r := range c.SnatPorts {
		p.add(r.Low, r.High)
	}
	return p
}

// snatBeside are the ports of these that programs masquerade to at a level. If netfilter serves NodePorts, neither a socket nor an entry of
// ours shows that one is taken.
func (c Config) snatBeside(l netfilter.Level, given snatGiven) snatGiven {
	if len(c.SnatPorts) == 0 && l == netfilter.Translates {
		given.snat = given.snat.without(usualNodePorts.ports()).largest(config.PortRanges)
	}
	return given
}

// snatHeld are the ports that flows of older builds may hold. Those builds know one range alone.
func (c Config) snatHeld() PortRange {
	if len(c.SnatPorts) == 1 {
		return c.SnatPorts[0]
	}
	return olderSnat
}

// ParsePortRanges reads a list of ranges, such as "1024-29999,50000-65535", of which programs take a few only.
func ParsePortRanges(s string) (all []PortRange, err error) {
	for one := range strings.SplitSeq(s, ",") {
		first, last, _ := strings.Cut(strings.TrimSpace(one), "-")
		low, err1 := strconv.ParseUint(first, 10, 16)
		high, err2 := strconv.ParseUint(last, 10, 16)
		if err := errors.Join(err1, err2); err != nil || low == 0 || low > high {
			return nil, fmt.Errorf("%q is no range of ports", one)
		}
		all = append(all, PortRange{uint16(low), uint16(high)})
	}
	if len(all) > config.PortRanges {
		return nil, fmt.Errorf("%d ranges are too many", len(all))
	}
	return all, nil
}

// parsePortRange reads the kernel's notation: "32768	60999".
func parsePortRange(s string) (r PortRange, err error) {
	if _, err := fmt.Sscan(s, &r.Low, &r.High); err != nil {
		return r, fmt.Errorf("sysctl %s: %q is no range of ports", ephemeralPorts, s)
	}
	return r, nil
}

// snatGiven are the ports that new masqueraded flows get.
type snatGiven struct {
	// snat are in as many pieces as programs take, and privileged in one: what flows get that begin below 1024. None: any.
	snat, privileged ports
}

// portShares says how the node's ports are divided between the host's own sockets that ask for any port, masquerading, and NodePorts
// and host ports.
type portShares struct {
	// asked is --snat-ports, and snat the part of it that masqueraded flows get. auto says that all are asked for that can be had.
	asked ports
	snatGiven
	auto bool
	// ephemeral is where the kernel takes the ports for sockets that ask for any, and free are those of them that others than we have
	// not reserved.
	ephemeral PortRange
	free      ports
	// ours are all ports that we reserve.
	ours ports
	// unreserved is how many NodePorts and host ports are not, to leave enough to the host.
	unreserved int
	// reserved is how many NodePorts and host ports are reserved among the free ephemeral ports, and left how many more can be.
	reserved, left int
}

// shareSnat decides which ports to masquerade to: of those asked for as many as leave the host enough, which keeps the lowest of its
// ephemeral ports. An eighth of what the host can spare is for NodePorts and host ports. With auto, the ports that the administrator has
// reserved are left out.
func shareSnat(asked ports, auto bool, ephemeral PortRange, others ports) portShares {
	s := portShares{asked: asked, snatGiven: snatGiven{snat: asked}, auto: auto, ephemeral: ephemeral, free: ephemeral.ports().without(others)}
	if auto {
		s.snat = asked.without(others)
		s.privileged = privilegedSnat.ports().without(others).largest(1)
	}
	wanted := asked.and(s.free)
	beyond := wanted.count() - s.spare()*7/8
	for port := range wanted.all() {
		if beyond <= 0 {
			break
		}
		s.snat.remove(port)
		beyond--
	}
	s.snat = s.snat.largest(config.PortRanges)
	// The kernel gives no other port to a socket that asks for any.
	s.ours = s.snat.and(ephemeral.ports())
	return s
}

// spare is how many ephemeral ports the host can do without.
func (s *portShares) spare() int {
	return max(0, s.free.count()-max(leastEphemeral, (s.ephemeral.size()+1)/2))
}

// add reserves NodePorts and host ports too, the lowest first, as far as the host can spare them.
func (s *portShares) add(used ports) {
	s.left = s.spare() - s.ours.and(s.free).count()
	for port := range used.without(s.ours).all() {
		if s.free.has(port) {
			if s.left == 0 {
				s.unreserved++
				continue
			}
			s.left--
			s.reserved++
		}
		s.ours.add(uint16(port), uint16(port)) //nolint:gosec // a port
	}
}

// problems are those of the division.
func (s *portShares) problems() (found []observe.NetworkProblem) {
	const remedy = "give --snat-ports ports outside of " + ephemeralName + ", or widen that"
	host := fmt.Sprintf("the node's own processes too few of their ephemeral ports (%s %s, without what others have reserved)", ephemeralName, s.ephemeral)
	if s.auto && s.snat.count() < fewSnat {
		found = append(found, observe.NetworkProblem{
			Reason: snatPortsReduced, About: "auto",
			Text:   fmt.Sprintf("masqueraded flows get %d ports alone (%s): others have reserved ports (net.ipv4.ip_local_reserved_ports), and the largest %d pieces of what is left are used", s.snat.count(), s.snat, config.PortRanges),
			Remedy: "reserve fewer ports, or ports that lie beside each other, or name others by --snat-ports",
		})
	}
	if s.snat != s.asked && !s.auto {
		text := fmt.Sprintf("--snat-ports %s would leave %s: masqueraded flows get ports %s alone", s.asked, host, s.snat)
		if s.snat == (ports{}) {
			text = fmt.Sprintf("--snat-ports %s would leave %s: none is left to masquerade to, and pods' new flows to the world are dropped (SNAT_EXHAUSTED)", s.asked, host)
		}
		found = append(found, observe.NetworkProblem{Reason: snatPortsReduced, About: s.asked.String(), Text: text, Remedy: remedy})
	}
	if s.unreserved > 0 {
		found = append(found, observe.NetworkProblem{
			Reason: portsUnreserved,
			Text:   fmt.Sprintf("to reserve %d more NodePorts and host ports would leave %s: a connection of the node's own may get one of these ports", s.unreserved, host),
			Remedy: remedy,
		})
	}
	if isNear(s.reserved, s.reserved+s.left) && s.unreserved == 0 {
		found = append(found, observe.NetworkProblem{
			Reason: portsNearly,
			Text: fmt.Sprintf("NodePorts and host ports are %d of the %d ephemeral ports (%s %s) that can be reserved for them: further ones stay unreserved, and a connection of the node's own may get one of these ports",
				s.reserved, s.reserved+s.left, ephemeralName, s.ephemeral),
			Remedy: "choose NodePorts and host ports outside of " + ephemeralName + ", or widen that",
		})
	}
	if left := s.free.without(s.ours).count(); left < scarceEphemeral {
		found = append(found, observe.NetworkProblem{
			Reason: ephemeralFew,
			Text:   fmt.Sprintf("%d ephemeral ports (%s %s, without net.ipv4.ip_local_reserved_ports) are left to the node's own processes, whose connections may fail (EADDRNOTAVAIL)", left, ephemeralName, s.ephemeral),
			Remedy: "widen " + ephemeralName + ", or reserve fewer ports",
		})
	}
	return found
}

// portShares reads how the ports are divided now.
func (c *sysctls) portShares() (s portShares, err error) {
	_, now, err1 := c.reserved()
	text, err2 := c.Get(ephemeralPorts)
	if err := errors.Join(err1, err2); err != nil {
		return s, err
	}
	ephemeral, err := parsePortRange(text)
	if err != nil {
		return s, err
	}
	return shareSnat(c.cfg.snatPorts(), len(c.cfg.SnatPorts) == 0, ephemeral, now.without(addedBy(c.record.Sysctls[reservedPorts]))), nil
}
