package ipam

import (
	"math"
	"net/netip"
)

// Usage is how many addresses of a prefix are in which state.
type Usage struct {
	Used, Quarantined, Free int
}

// Usage counts the addresses of a prefix that is allocated from as a whole; an invalid prefix has none. Those of a very
// large one are math.MaxInt32.
func (s *Store) Usage(p netip.Prefix) (u Usage, err error) {
	all, err := s.Entries()
	if err != nil {
		return u, err
	}
	for _, e := range all {
		switch {
		case !p.IsValid() || !p.Contains(e.Address):
		case e.State == Used:
			u.Used++
		case e.State == Quarantined && !s.quarantineOver(e.Since):
			u.Quarantined++
		}
	}
	u.Free = max(0, usable(p)-u.Used-u.Quarantined)
	return u, nil
}

// usable is how many addresses host-local allocates of a prefix: not those of the network itself and of its gateway, and
// for IPv4 not the broadcast address.
func usable(p netip.Prefix) int {
	host := p.Addr().BitLen() - p.Bits()
	switch {
	case !p.IsValid() || host < 2:
		return 0
	case host >= 31:
		return math.MaxInt32
	case p.Addr().Is4():
		return 1<<host - 3
	}
	return 1<<host - 2
}
