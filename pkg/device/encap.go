package device

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Encap is the kind of a route's lightweight tunnel, as the kernel numbers it (LWTUNNEL_ENCAP_*); 0: the route has none.
type Encap uint16

// encaps are those that have a name in `ip route`.
var encaps = map[Encap]string{
	unix.LWTUNNEL_ENCAP_MPLS: "mpls", unix.LWTUNNEL_ENCAP_IP: "ip", unix.LWTUNNEL_ENCAP_ILA: "ila", unix.LWTUNNEL_ENCAP_IP6: "ip6",
	unix.LWTUNNEL_ENCAP_SEG6: "seg6", unix.LWTUNNEL_ENCAP_BPF: "bpf", unix.LWTUNNEL_ENCAP_SEG6_LOCAL: "seg6local",
	unix.LWTUNNEL_ENCAP_RPL: "rpl", unix.LWTUNNEL_ENCAP_IOAM6: "ioam6", unix.LWTUNNEL_ENCAP_XFRM: "xfrm",
}

// String is what `ip route` writes.
func (e Encap) String() string {
	if name, known := encaps[e]; known {
		return "encap " + name
	}
	return fmt.Sprintf("encap %d", uint16(e))
}

// Hides reports whether programs on the link that the route leads over see another packet than the one that was routed. The other
// kinds leave the packet as it is: they name the far end to a tunnel's device, run a program, or take a packet to the node itself out of
// another one (seg6local).
func (e Encap) Hides() bool {
	switch e {
	case 0, unix.LWTUNNEL_ENCAP_IP, unix.LWTUNNEL_ENCAP_IP6, unix.LWTUNNEL_ENCAP_BPF, unix.LWTUNNEL_ENCAP_XFRM,
		unix.LWTUNNEL_ENCAP_SEG6_LOCAL:
		return false
	}
	return true
}
