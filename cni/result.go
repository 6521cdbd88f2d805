package cni

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// makeResult returns the result of ADD: the host's end, the pod's end, addresses, routes and DNS settings.
func (a *addition) makeResult() *current.Result {
	w, pod := &a.work, 1
	r := &current.Result{
		CNIVersion: current.ImplementedSpecVersion,
		Interfaces: []*current.Interface{
			{Name: w.HostName, Mac: w.HostMAC.String(), Mtu: w.MTU},
			{Name: w.IfName, Mac: w.PodMAC.String(), Mtu: w.MTU, Sandbox: w.NetNS},
		},
		Routes: a.podRoutes(),
		DNS:    a.dns,
	}
	if !a.resolv.IsEmpty() {
		r.DNS = a.resolv
	}
	for _, addr := range w.Addresses {
		r.IPs = append(r.IPs, &current.IPConfig{
			Interface: &pod, Gateway: endpoint.Gateway(addr).AsSlice(),
			Address: net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		})
	}
	return r
}

// podRoutes are the requested routes and, without any or if they are asked for, a default route for each family. All use the only gateway.
func (a *addition) podRoutes() []*types.Route {
	var out []*types.Route
	for _, addr := range a.work.Addresses {
		asked := slices.Clone(a.routes)
		everywhere := defaultRoute(addr)
		same := func(r *types.Route) bool { return toPrefix(&r.Dst) == toPrefix(&everywhere.Dst) }
		if len(asked) == 0 || a.defaultRoutes && !slices.ContainsFunc(asked, same) {
			asked = append(asked, everywhere)
		}
		for _, r := range asked {
			if (r.Dst.IP.To4() != nil) != addr.Is4() {
				continue
			}
			gateway := endpoint.Gateway(addr)
			if r.GW != nil && toAddr(r.GW) != gateway {
				a.log.Warn("gateway of a route ignored, pods have only one", "dst", r.Dst.String(), "gateway", r.GW, "used", gateway)
			}
			way := r.Copy()
			way.GW = gateway.AsSlice()
			out = append(out, way)
		}
	}
	return out
}

// defaultRoute is that of an address's family.
func defaultRoute(addr netip.Addr) *types.Route {
	zero := netip.IPv4Unspecified()
	if addr.Is6() {
		zero = netip.IPv6Unspecified()
	}
	return &types.Route{Dst: net.IPNet{IP: zero.AsSlice(), Mask: net.CIDRMask(0, zero.BitLen())}}
}

func toRoute(r *types.Route) device.Route {
	way := device.Route{Dst: toPrefix(&r.Dst), Gateway: toAddr(r.GW), Priority: r.Priority, MTU: r.MTU, AdvMSS: r.AdvMSS, Scope: r.Scope}
	if r.Table != nil {
		way.Table = *r.Table
	}
	return way
}

// printResult prints the result in the version of the specification that the runtime speaks.
func (a *addition) printResult() error {
	r, err := a.result.GetAsVersion(a.version)
	if err != nil {
		return fmt.Errorf("convert result to version %s: %w", a.version, err)
	}
	if err := r.PrintTo(a.stdout); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// toCurrent converts a result from outside. The library's conversion of older versions panics at a null instead of an
// object; that of newer ones lets it through.
func toCurrent(r types.Result) (out *current.Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			out, err = nil, fmt.Errorf("malformed result: %v", p)
		}
	}()
	if out, err = current.NewResultFromResult(r); err != nil {
		return nil, err
	}
	if slices.Contains(out.IPs, nil) || slices.Contains(out.Interfaces, nil) || slices.Contains(out.Routes, nil) {
		return nil, errors.New("malformed result: null in a list")
	}
	return out, nil
}

func toAddr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// toPrefix converts n. The result is invalid if that is impossible, as for an IPv4 address with an IPv6 mask.
func toPrefix(n *net.IPNet) netip.Prefix {
	ones, bits := n.Mask.Size()
	a := toAddr(n.IP)
	if !a.IsValid() || bits != a.BitLen() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(a, ones).Masked()
}
