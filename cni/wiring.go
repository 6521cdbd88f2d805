package cni

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

var (
	gatewayIPv4 = netip.MustParseAddr("169.254.1.1")
	gatewayIPv6 = netip.MustParseAddr("fe80::1")
)

// gateway is the pods' only next hop. No interface has the address: the pod's neighbour table leads it to the host's
// end of the veth.
func gateway(a netip.Addr) netip.Addr {
	if a.Is4() {
		return gatewayIPv4
	}
	return gatewayIPv6
}

func whole(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// macs makes the two ends' addresses, the pod's unless it was asked for. They are set when the link is made, which
// also keeps systemd from choosing others.
func macs(pod net.HardwareAddr) (host, chosen net.HardwareAddr, err error) {
	var b [12]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, nil, fmt.Errorf("choose Ethernet addresses: %w", err)
	}
	for _, first := range []int{0, 6} {
		b[first] = b[first]&^1 | 2 // one interface's, locally administered
	}
	if pod == nil {
		pod = b[6:]
	}
	return b[:6], pod, nil
}

func (a *addition) createVeth(context.Context) (err error) {
	a.hostLink, err = a.host.CreateVeth(device.Veth{
		Name: a.id.HostLinkName(), MAC: a.hostMAC, PeerName: a.id.IfName, PeerMAC: a.podMAC, PeerNS: a.netns, MTU: a.mtu,
	})
	if errors.Is(err, unix.EEXIST) {
		return types.NewError(codeExists, fmt.Sprintf("interface %s exists already in %s, and is not of this attachment",
			a.id.IfName, a.args.Netns), err.Error())
	}
	return err
}

// podIndex is the index of the pod's end. The host's end knows it, and asking in the pod would be one more wait for the
// kernel's lock of all links, which other pods' attachments hold for milliseconds.
func (a *addition) podIndex() int { return a.hostLink.PeerIndex }

// configurePod gives the pod its addresses and its way out. Routes need the pod's end up; the pair carries nothing
// as long as the host's end is down.
func (a *addition) configurePod(context.Context) error {
	if err := a.enableIPv6(); err != nil {
		return err
	}
	if err := a.pod.SetUp(a.podIndex()); err != nil {
		return err
	}
	for _, addr := range a.addresses {
		if err := a.pod.AddAddress(a.podIndex(), whole(addr)); err != nil {
			return err
		}
		way := device.Route{Dst: whole(gateway(addr)), Index: a.podIndex(), Foreign: true}
		if err := a.pod.ReplaceRoute(way); err != nil {
			return err
		}
		if err := a.pod.ReplaceNeighbour(a.podIndex(), gateway(addr), a.hostMAC); err != nil {
			return err
		}
	}
	for _, r := range a.podRoutes() {
		if err := a.pod.ReplaceRoute(a.podRoute(r)); err != nil {
			return err
		}
	}
	return nil
}

// enableIPv6: container engines turn IPv6 off in new namespaces, which a pod with an IPv6 address can't have.
func (a *addition) enableIPv6() error {
	for _, addr := range a.addresses {
		if addr.Is4() {
			continue
		}
		return a.netns.Do(func() error {
			_, err := device.Sysctl{}.Set("net/ipv6/conf/"+a.id.IfName+"/disable_ipv6", "0")
			return err
		})
	}
	return nil
}

// podRoutes are the routes of the ipam configuration or, without any, a default route for each family. All lead to
// the one gateway there is.
func (a *addition) podRoutes() []*types.Route {
	var out []*types.Route
	for _, addr := range a.addresses {
		if len(a.routes) == 0 {
			zero := netip.IPv4Unspecified()
			if addr.Is6() {
				zero = netip.IPv6Unspecified()
			}
			dst := net.IPNet{IP: zero.AsSlice(), Mask: net.CIDRMask(0, zero.BitLen())}
			out = append(out, &types.Route{Dst: dst, GW: gateway(addr).AsSlice()})
			continue
		}
		for _, r := range a.routes {
			if (r.Dst.IP.To4() != nil) != addr.Is4() {
				continue
			}
			if r.GW != nil && !r.GW.Equal(gateway(addr).AsSlice()) {
				a.log.Warn("gateway of a route ignored", "dst", r.Dst.String(), "gateway", r.GW, "used", gateway(addr))
			}
			way := r.Copy()
			way.GW = gateway(addr).AsSlice()
			out = append(out, way)
		}
	}
	return out
}

func (a *addition) podRoute(r *types.Route) device.Route {
	dst, gw := toPrefix(&r.Dst), toAddr(r.GW)
	way := device.Route{
		Dst: dst, Index: a.podIndex(), Gateway: gw, Foreign: true, Priority: r.Priority, MTU: r.MTU, AdvMSS: r.AdvMSS,
		Scope: r.Scope,
	}
	if r.Table != nil {
		way.Table = *r.Table
	}
	return way
}

func (a *addition) setSysctls(context.Context) error {
	s, of := device.Sysctl{}, "net/ipv4/conf/"+a.hostLink.Name+"/"
	// Strict: the route to the pod's address leads back here, so the kernel refuses every other source while our program
	// is off the link. The larger of this and the setting for all interfaces counts, but on a link without an address loose
	// is as strict.
	if _, err := s.Set(of+"rp_filter", "1"); err != nil {
		return err
	}
	if _, err := s.Set(of+"forwarding", "1"); err != nil {
		return err
	}
	for _, addr := range a.addresses {
		if addr.Is4() {
			continue
		}
		_, err := s.Set("net/ipv6/conf/"+a.hostLink.Name+"/forwarding", "1")
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (a *addition) attachProgram(context.Context) error {
	_, err := attach.Attacher{Dir: a.pins, Mode: a.attach, New: true}.Attach(a.hostLink.Index, attach.FromPod, a.plane.fromPod)
	return err
}

// writeDevice tells the program what the pod may send from, before it can send anything.
func (a *addition) writeDevice(context.Context) error {
	return a.plane.devices.Put(devices.Key{Ifindex: uint32(a.hostLink.Index)}, a.device())
}

func (a *addition) device() devices.Value {
	v := devices.Value{PodMAC: wire.MAC(a.podMAC), HostMAC: wire.MAC(a.hostMAC)}
	v.SetAddresses(a.addresses)
	return v
}

// setUp is what gives both ends a carrier. The first packet that the pod sends must not be lost.
func (a *addition) setUp(ctx context.Context) error {
	a.wasUp = true
	if err := a.host.SetUp(a.hostLink.Index); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), linkTimeout) // ctx is for waiting for locks
	defer cancel()
	return errors.Join(a.host.WaitRunning(ctx, a.hostLink.Index), a.pod.WaitRunning(ctx, a.podIndex()))
}

// linkTimeout is how long the kernel may take to activate a link; it is a matter of microseconds, or of milliseconds
// before Linux 6.8.
const linkTimeout = 5 * time.Second

// writeRoutes leads what the host itself sends to the pod. The neighbour is written down as well: the pod's answer
// to an ARP request would have to pass a program that lets nothing but IP out of a pod.
func (a *addition) writeRoutes(context.Context) error {
	for _, addr := range a.addresses {
		if err := a.host.ReplaceNeighbour(a.hostLink.Index, addr, a.podMAC); err != nil {
			return err
		}
		r := device.Route{Dst: whole(addr), Index: a.hostLink.Index, Source: a.plane.nodeAddress(addr)}
		err := a.host.AddRoute(r)
		if err != nil && r.Source.IsValid() && errors.Is(err, unix.EINVAL) {
			a.log.Warn("the node's address is on no interface, route written without it", "address", r.Source)
			r.Source = netip.Addr{}
			err = a.host.AddRoute(r)
		}
		if errors.Is(err, unix.EEXIST) {
			return a.routeTaken(addr)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// writeDestinations is for addresses that another ipam type chose outside the node's podCIDRs: only those inside are
// looked up among the endpoints without being asked for.
func (a *addition) writeDestinations(context.Context) error {
	for _, addr := range a.addresses {
		if a.plane.inPodCIDR(addr) {
			continue
		}
		err := a.plane.destinations.Put(destinations.KeyFrom(whole(addr)), destinations.Value{Kind: destinations.Local})
		if err != nil {
			return err
		}
	}
	return nil
}

func (a *addition) writeEndpoints(ctx context.Context) error {
	v := endpoints.Value{Ifindex: uint32(a.hostLink.Index), PodMAC: wire.MAC(a.podMAC), HostMAC: wire.MAC(a.hostMAC)}
	for _, addr := range a.addresses {
		if err := a.claimer().Claim(ctx, addr, v); err != nil {
			return refusal(err)
		}
	}
	return nil
}
