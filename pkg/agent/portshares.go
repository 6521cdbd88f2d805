package agent

import (
	"errors"
	"fmt"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// ephemeralName is what administrators call ephemeralPorts.
const ephemeralName = "net.ipv4.ip_local_port_range"

const (
	// leastEphemeral is how many ephemeral ports masquerading, NodePorts and host ports leave to the host's own sockets in any case:
	// those, or half of them if that is more.
	leastEphemeral = 8192
	// scarceEphemeral is the number of free ephemeral ports below which a node has too few.
	scarceEphemeral = 1024
)

// portRange are the ports from low to high; without any, high is below low.
type portRange struct{ low, high uint16 }

// noPorts has none. Port 0 is never used.
var noPorts = portRange{1, 0}

func (r portRange) size() int { return int(r.high) - int(r.low) + 1 }

func (r portRange) String() string { return fmt.Sprintf("%d-%d", r.low, r.high) }

func (r portRange) ports() (p ports) {
	p.add(r.low, r.high)
	return p
}

// snatPorts are the ports that the administrator wants masqueraded flows to get.
func (c Config) snatPorts() portRange { return portRange{c.SnatLow, c.SnatHigh} }

// parsePortRange reads the kernel's notation: "32768	60999".
func parsePortRange(s string) (r portRange, err error) {
	if _, err := fmt.Sscan(s, &r.low, &r.high); err != nil {
		return r, fmt.Errorf("sysctl %s: %q is no range of ports", ephemeralPorts, s)
	}
	return r, nil
}

// portShares says how the node's ports are divided between the host's own sockets that ask for any port, masquerading, and NodePorts
// and host ports.
type portShares struct {
	// asked is --snat-ports, and snat the part of it that masqueraded flows get.
	asked, snat portRange
	// ephemeral is where the kernel takes the ports for sockets that ask for any, and free are those of them that others than we have
	// not reserved.
	ephemeral portRange
	free      ports
	// ours are all ports that we reserve.
	ours ports
	// unreserved is how many NodePorts and host ports are not, to leave enough to the host.
	unreserved int
}

// shareSnat decides which ports to masquerade to: of those asked for as many in one piece as leave the host enough, of several such
// pieces the highest. An eighth of what the host can spare is for NodePorts and host ports.
func shareSnat(asked, ephemeral portRange, others ports) portShares {
	s := portShares{asked: asked, snat: noPorts, ephemeral: ephemeral, free: ephemeral.ports().without(others)}
	most := s.spare() * 7 / 8
	low, taken := int(asked.low), 0
	for high := int(asked.low); high <= int(asked.high); high++ {
		if s.free.has(high) {
			taken++
		}
		for ; taken > most; low++ {
			if s.free.has(low) {
				taken--
			}
		}
		if high-low+1 >= max(1, s.snat.size()) {
			s.snat = portRange{uint16(low), uint16(high)} //nolint:gosec // both are within asked
		}
	}
	s.ours = s.snat.ports()
	return s
}

// spare is how many ephemeral ports the host can do without.
func (s *portShares) spare() int {
	return max(0, s.free.count()-max(leastEphemeral, (s.ephemeral.size()+1)/2))
}

// add reserves NodePorts and host ports too, the lowest first, as far as the host can spare them.
func (s *portShares) add(used ports) {
	left := s.spare() - s.ours.and(s.free).count()
	for port := range used.without(s.ours).all() {
		if s.free.has(port) {
			if left == 0 {
				s.unreserved++
				continue
			}
			left--
		}
		s.ours.add(uint16(port), uint16(port)) //nolint:gosec // a port
	}
}

// problems are those of the division.
func (s *portShares) problems() (found []observe.NetworkProblem) {
	const remedy = "give --snat-ports ports outside of " + ephemeralName + ", or widen that"
	host := fmt.Sprintf("the node's own processes too few of their ephemeral ports (%s %s, without what others have reserved)", ephemeralName, s.ephemeral)
	if s.snat != s.asked {
		text := fmt.Sprintf("--snat-ports %s would leave %s: masqueraded flows get ports %s alone", s.asked, host, s.snat)
		if s.snat == noPorts {
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
	return shareSnat(c.cfg.snatPorts(), ephemeral, now.without(addedBy(c.record.Sysctls[reservedPorts]))), nil
}
