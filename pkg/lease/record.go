package lease

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Subnet is what a node leases: a prefix of IPv4, and in a network of both families one of IPv6.
type Subnet [wire.Families]netip.Prefix

// String is the last part of the lease's key, such as 10.5.52.0-24&fc00:0:0:34::-64.
func (s Subnet) String() string {
	text := func(p netip.Prefix) string { return fmt.Sprintf("%s-%d", p.Addr(), p.Bits()) }
	if !s[wire.IPv6].IsValid() {
		return text(s[wire.IPv4])
	}
	return text(s[wire.IPv4]) + "&" + text(s[wire.IPv6])
}

// all are its prefixes.
func (s Subnet) all() (all []netip.Prefix) {
	for _, p := range s {
		if p.IsValid() {
			all = append(all, p)
		}
	}
	return all
}

func (s Subnet) overlaps(o Subnet) bool {
	for f, p := range s {
		if p.Overlaps(o[f]) {
			return true
		}
	}
	return false
}

// parseSubnet reads the last part of a lease's key.
func parseSubnet(text string) (s Subnet, ok bool) {
	ipv4, ipv6, both := strings.Cut(text, "&")
	if s[wire.IPv4], ok = parseDashed(ipv4); !ok || !s[wire.IPv4].Addr().Is4() {
		return s, false
	}
	if both {
		s[wire.IPv6], ok = parseDashed(ipv6)
		ok = ok && s[wire.IPv6].Addr().Is6()
	}
	return s, ok
}

// parseDashed reads a prefix with a dash in the place of the slash.
func parseDashed(text string) (netip.Prefix, bool) {
	address, bits, _ := strings.Cut(text, "-")
	a, err := netip.ParseAddr(address)
	n, err2 := strconv.ParseUint(bits, 10, 8)
	if err != nil || err2 != nil || a.Zone() != "" || int(n) > a.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, int(n)).Masked(), true
}

// record is what a lease's key contains, as flanneld writes and reads it.
type record struct {
	PublicIP      netip.Addr
	PublicIPv6    *netip.Addr
	BackendType   Kind            `json:",omitempty"`
	BackendData   json.RawMessage `json:",omitempty"`
	BackendV6Data json.RawMessage `json:",omitempty"`
}

// vtep is the backend's data of VXLAN: what the inner frame is addressed to.
type vtep struct {
	VNI     uint32
	VtepMAC wire.MAC
}

// newRecord is a node's record, with the MAC address of its end of the tunnel.
func newRecord(public [wire.Families]netip.Addr, b Backend, mac wire.MAC) (record, error) {
	r := record{PublicIP: public[wire.IPv4], BackendType: b.Kind}
	if ipv6 := public[wire.IPv6]; ipv6.IsValid() {
		r.PublicIPv6 = &ipv6
	}
	if b.Kind != VXLAN {
		return r, nil
	}
	data, err := json.Marshal(vtep{b.VNI, mac})
	if err != nil {
		return r, fmt.Errorf("encode the lease's data: %w", err)
	}
	r.BackendData = data
	if r.PublicIPv6 != nil {
		r.BackendV6Data = data
	}
	return r, nil
}

// public are its addresses by family; an invalid one: it has none.
func (r record) public() (all [wire.Families]netip.Addr) {
	all[wire.IPv4] = r.PublicIP
	if r.PublicIPv6 != nil {
		all[wire.IPv6] = *r.PublicIPv6
	}
	return all
}

// macs are what inner frames are addressed to where the outer packet is of a family; zero: the node takes any.
func (r record) macs() (all [wire.Families]wire.MAC, err error) {
	for f, data := range [wire.Families]json.RawMessage{wire.IPv4: r.BackendData, wire.IPv6: r.BackendV6Data} {
		if r.BackendType != VXLAN || len(data) == 0 || string(data) == "null" {
			continue
		}
		var v vtep
		if err := json.Unmarshal(data, &v); err != nil {
			return all, fmt.Errorf("the data of its backend: %w", err)
		}
		all[f] = v.VtepMAC
	}
	return all, nil
}
