package agent

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// mostAddresses is of how many addresses behind one port it is remembered that they are there. A container has one or two; one that
// takes ever more costs no memory.
const mostAddresses = 64

// lodger is who has an address behind a bridge.
type lodger struct {
	bridge  int
	address netip.Addr
}

// station is an Ethernet address that a bridge may have learnt.
type station struct {
	bridge int
	mac    string
}

// nowhere is the port of who is behind none that is known.
const nowhere = 0

// lodgers remembers who is where: nobody says that a container comes or goes, and a bridge forgets those that are silent, and a
// port's with the port. The kernel gives no index to two devices, so another port is another container, also where that has the same
// Ethernet address, as Docker makes it of the address.
type lodgers struct {
	// ports are those behind which an address has been seen, the first one first. Any container can claim another one's by a frame,
	// so the flows are those of the first for as long as that port lives.
	ports    map[lodger][]int
	crowded  map[int]int     // bridges, by ports with more addresses than are remembered
	unplaced map[lodger]bool // neighbours of the last look that were behind no known port
}

// look learns from the neighbours on bridges who has which Ethernet address, and from the bridges behind which port that is; who is
// not among the latter is not known about. It returns who has left. Without links it is not known which ports have gone.
func (l *lodgers) look(neighbours []device.Neighbour, where map[station]int, links map[int]device.Link) departures {
	first := l.ports == nil
	if first {
		l.ports, l.crowded = map[lodger][]int{}, map[int]int{}
	}
	left := l.leave(links)
	fits := l.room()
	unplaced := map[lodger]bool{}
	for _, n := range neighbours {
		who := lodger{n.Index, n.Addr}
		port, known := where[station{n.Index, string(n.MAC)}]
		switch {
		case !known && !first && !l.unplaced[who], slices.Contains(l.ports[who], port), port == nowhere && len(l.ports[who]) > 0: // silent perhaps
		case port == nowhere:
			unplaced[who] = true
			if !first && known && !l.unplaced[who] { // it has come and gone between two looks
				left.addresses[who] = true
			}
		case fits(port):
			l.ports[who] = append(l.ports[who], port)
		default:
			l.crowded[port] = n.Index
		}
	}
	l.unplaced = unplaced
	if !left.empty() {
		left.stay = maps.Clone(l.ports)
	}
	return left
}

// leave forgets ports that are gone, and returns who has left with them.
func (l *lodgers) leave(links map[int]device.Link) departures {
	left := departures{addresses: map[lodger]bool{}, bridges: map[int]bool{}}
	if links == nil {
		return left
	}
	for who, ports := range l.ports {
		gone := func(port int) bool { return links[port].Master != who.bridge }
		if gone(ports[0]) {
			left.addresses[who] = true
		}
		if ports = slices.DeleteFunc(ports, gone); len(ports) > 0 {
			l.ports[who] = ports
		} else {
			delete(l.ports, who)
		}
	}
	for port, bridge := range l.crowded {
		if links[port].Master != bridge {
			left.bridges[bridge] = true
			delete(l.crowded, port)
		}
	}
	return left
}

// room returns what says whether one more address behind a port is remembered.
func (l *lodgers) room() func(port int) bool {
	has := map[int]int{}
	for _, ports := range l.ports {
		for _, port := range ports {
			has[port]++
		}
	}
	return func(port int) bool {
		has[port]++
		return has[port] <= mostAddresses
	}
}

// departures are containers that have left their addresses, which others may get.
type departures struct {
	addresses map[lodger]bool
	bridges   map[int]bool     // of these also whoever is not known to stay
	stay      map[lodger][]int // as lodgers.ports
}

func (d departures) empty() bool { return len(d.addresses) == 0 && len(d.bridges) == 0 }

// and returns these departures and later ones.
func (d departures) and(later departures) departures {
	switch {
	case d.empty():
		return later
	case later.empty():
		return d
	}
	maps.Copy(d.addresses, later.addresses)
	maps.Copy(d.bridges, later.bridges)
	d.stay = later.stay
	return d
}

// include says whether who has the address behind the bridge has left it.
func (d departures) include(bridge uint32, address wire.Addr) bool {
	who := lodger{int(bridge), address.Netip()}
	return d.addresses[who] || d.bridges[who.bridge] && d.stay[who] == nil
}
