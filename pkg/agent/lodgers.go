package agent

import (
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// mostDepartures is how many containers may leave at once.
const mostDepartures = 4096

// departure is a container that has left its address, which another one may get.
type departure struct {
	bridge  int
	address netip.Addr
}

// lodging is where a container with an address is: behind which port of which bridge. The kernel gives no index to two devices, so
// another port is another container, also where that has the same Ethernet address, as Docker makes it of the address.
type lodging struct{ bridge, port int }

// nowhere is the port of who was not behind any when it was first seen.
const nowhere = 0

// lodgers remembers who is where: nobody says that a container comes or goes, and a bridge forgets those that are silent, and a
// port's with the port.
type lodgers map[netip.Addr]lodging

// look learns from the neighbours on bridges who has which Ethernet address, and from the bridges behind which port that is. It
// returns who has left. Without links it is not known which ports have gone.
func (l *lodgers) look(neighbours []device.Neighbour, known []device.BridgeEntry, links map[int]device.Link) (left []departure) {
	first := *l == nil
	type station struct {
		bridge int
		mac    string
	}
	ports := map[station]int{}
	for _, e := range known {
		ports[station{e.Bridge, string(e.MAC)}] = e.Port
	}
	now, gone := lodgers{}, map[netip.Addr]bool{}
	for address, was := range *l {
		if links == nil || was.port == nowhere && links[was.bridge].Index != 0 || links[was.port].Master == was.bridge {
			now[address] = was // silent perhaps
		} else {
			left, gone[address] = append(left, departure{was.bridge, address}), true
		}
	}
	for _, n := range neighbours {
		was, lodged := now[n.Addr]
		is := lodging{n.Index, ports[station{n.Index, string(n.MAC)}]}
		switch {
		case is.port == nowhere && lodged: // silent
			continue
		case is.port == nowhere && !first && !gone[n.Addr]: // it has come and gone between two looks
			left = append(left, departure{is.bridge, n.Addr})
		case lodged && was.port != nowhere && was != is: // two have it, or it has moved
			left = append(left, departure{was.bridge, n.Addr})
		}
		now[n.Addr] = is
	}
	*l = now
	return left
}
