package lease

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Network is the configuration of the network, of the key config.
type Network struct {
	// Ranges are what subnets are leased of, by family; one without a prefix: the network does not have that family.
	Ranges  [wire.Families]Range
	Backend Backend
}

// Range is what subnets of a family are leased of.
type Range struct {
	Prefix netip.Prefix
	// Bits is the length of a subnet's prefix.
	Bits int
	// First and Last are the network addresses of the first and the last subnet that are leased.
	First, Last netip.Addr
}

// written is a Network as it is written. Its names are those that errors have.
type written struct {
	EnableIPv4               *bool
	EnableIPv6               bool
	Network, IPv6Network     *string
	SubnetLen, IPv6SubnetLen uint
	SubnetMin, IPv6SubnetMin *string
	SubnetMax, IPv6SubnetMax *string
	Backend                  json.RawMessage
}

// ParseNetwork reads the configuration as flanneld does, with its defaults. An error begins with the name that it is about.
func ParseNetwork(text []byte) (n Network, err error) {
	var w written
	if err := unmarshal(text, &w); err != nil {
		return n, err
	}
	switch {
	case w.EnableIPv4 == nil || *w.EnableIPv4:
	case w.EnableIPv6:
		return n, errors.New("EnableIPv4: is false, and a lease of flanneld has to have an IPv4 subnet; IPv6 goes beside IPv4 only")
	default:
		return n, errors.New("EnableIPv4: is false, and so is EnableIPv6")
	}
	ipv4 := named{"", netip.IPv4Unspecified(), 24, w.Network, w.SubnetMin, w.SubnetMax, w.SubnetLen}
	if n.Ranges[wire.IPv4], err = ipv4.parse(); err != nil {
		return n, err
	}
	if w.EnableIPv6 {
		ipv6 := named{"IPv6", netip.IPv6Unspecified(), 64, w.IPv6Network, w.IPv6SubnetMin, w.IPv6SubnetMax, w.IPv6SubnetLen}
		if n.Ranges[wire.IPv6], err = ipv6.parse(); err != nil {
			return n, err
		}
	}
	n.Backend, err = parseBackend(w.Backend)
	return n, err
}

// unmarshal decodes JSON; its errors name what they are about.
func unmarshal(text []byte, into any) error {
	err := json.Unmarshal(text, into)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
		return fmt.Errorf("%s: is a %s", wrong.Field, wrong.Value)
	}
	if err != nil {
		return fmt.Errorf("no JSON: %w", err)
	}
	return nil
}

// named are the values of a family.
type named struct {
	names             string     // what the names of this family's values begin with
	family            netip.Addr // any of it
	usual             int        // length of a subnet, in a network that is large enough
	network, min, max *string
	bits              uint
}

// leastSplit is how many bits longer than the network a subnet is at least: the first of the four that there are then is not leased.
const leastSplit = 2

// parse applies flanneld's rules: a subnet has room for four addresses, a network for four subnets.
func (v named) parse() (r Range, err error) {
	if r.Prefix, err = v.prefix(); err != nil {
		return r, err
	}
	all := v.family.BitLen()
	switch longest := all - 2; {
	case v.bits > uint(longest):
		return r, fmt.Errorf("%sSubnetLen: is %d; at most %d", v.names, v.bits, longest)
	case v.bits > 0 && int(v.bits) < r.Prefix.Bits()+leastSplit:
		return r, fmt.Errorf("%sSubnetLen: is %d; %s has to have room for four subnets, so at least %d", v.names, v.bits, r.Prefix, r.Prefix.Bits()+leastSplit)
	case v.bits > 0:
		r.Bits = int(v.bits)
	case r.Prefix.Bits() > longest-leastSplit:
		return r, fmt.Errorf("%sNetwork: %s is too small; at most /%d", v.names, r.Prefix, longest-leastSplit)
	default:
		r.Bits = max(v.usual, r.Prefix.Bits()+leastSplit)
	}
	if r.First, err = v.bound("SubnetMin", v.min, r, next(r.Prefix.Addr(), r.Bits)); err != nil {
		return r, err
	}
	if r.Last, err = v.bound("SubnetMax", v.max, r, lastSubnet(r.Prefix, r.Bits)); err != nil {
		return r, err
	}
	if r.Last.Less(r.First) {
		return r, fmt.Errorf("%sSubnetMax: %s is before the first subnet, %s", v.names, r.Last, r.First)
	}
	return r, nil
}

func (v named) prefix() (netip.Prefix, error) {
	if v.network == nil {
		return netip.Prefix{}, fmt.Errorf("%sNetwork: is missing; a prefix such as 10.5.0.0/16", v.names)
	}
	p, err := netip.ParsePrefix(*v.network)
	if err != nil || p.Addr().BitLen() != v.family.BitLen() || p.Addr().Is4In6() || p.Bits() == 0 {
		return p, fmt.Errorf("%sNetwork: %q is no prefix of the family", v.names, *v.network)
	}
	return p.Masked(), nil
}

// bound reads SubnetMin or SubnetMax.
func (v named) bound(name string, text *string, r Range, usual netip.Addr) (netip.Addr, error) {
	if text == nil {
		return usual, nil
	}
	a, err := netip.ParseAddr(*text)
	switch {
	case err != nil || a.BitLen() != v.family.BitLen():
		return a, fmt.Errorf("%s%s: %q is no address of the family", v.names, name, *text)
	case a.IsUnspecified():
		return usual, nil
	case !r.Prefix.Contains(a):
		return a, fmt.Errorf("%s%s: %s is not in %s", v.names, name, a, r.Prefix)
	case netip.PrefixFrom(a, r.Bits).Masked().Addr() != a:
		return a, fmt.Errorf("%s%s: %s is not where a subnet of /%d begins", v.names, name, a, r.Bits)
	}
	return a, nil
}

// next is the address by which the subnet behind the one at a begins; past the last one it begins again.
func next(a netip.Addr, bits int) netip.Addr {
	octets := a.AsSlice()
	carry := uint16(1) << (7 - (bits-1)%8)
	for i := (bits - 1) / 8; i >= 0 && carry != 0; i-- {
		sum := uint16(octets[i]) + carry
		octets[i], carry = byte(sum), sum>>8
	}
	after, _ := netip.AddrFromSlice(octets)
	return after
}

// lastSubnet is where the last subnet of a prefix begins.
func lastSubnet(p netip.Prefix, bits int) netip.Addr {
	octets := p.Addr().AsSlice()
	for i := p.Bits(); i < bits; i++ {
		octets[i/8] |= 1 << (7 - i%8)
	}
	last, _ := netip.AddrFromSlice(octets)
	return last
}

// fits reports whether a subnet is one that is leased of this range.
func (r Range) fits(p netip.Prefix) bool {
	if !r.Prefix.IsValid() {
		return !p.IsValid()
	}
	return p.IsValid() && p.Bits() == r.Bits && !p.Addr().Less(r.First) && !r.Last.Less(p.Addr()) && r.Prefix.Contains(p.Addr())
}

// has reports whether a prefix is a part of this range, and not all of it.
func (r Range) has(p netip.Prefix) bool {
	return r.Prefix.IsValid() && p.Bits() > r.Prefix.Bits() && r.Prefix.Contains(p.Addr())
}

// within is what of a subnet is a part of the network.
func (n Network) within(s Subnet) (in Subnet) {
	for f, r := range n.Ranges {
		if r.has(s[f]) {
			in[f] = s[f]
		}
	}
	return in
}
