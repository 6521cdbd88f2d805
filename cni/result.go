package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
)

// makeResult describes the attachment: the host's end, the pod's end, an address of each family.
func (a *addition) makeResult() *current.Result {
	pod := 1
	r := &current.Result{
		CNIVersion: current.ImplementedSpecVersion,
		Interfaces: []*current.Interface{
			{Name: a.hostLink.Name, Mac: a.hostMAC.String(), Mtu: a.mtu},
			{Name: a.id.IfName, Mac: a.podMAC.String(), Mtu: a.mtu, Sandbox: a.args.Netns},
		},
		Routes: a.podRoutes(),
		DNS:    a.dns,
	}
	if !a.resolv.IsEmpty() {
		r.DNS = a.resolv
	}
	for _, addr := range a.addresses {
		r.IPs = append(r.IPs, &current.IPConfig{
			Interface: &pod, Gateway: gateway(addr).AsSlice(),
			Address: net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		})
	}
	return r
}

// encodeResult is the result in the version of the specification that the runtime speaks.
func (a *addition) encodeResult() ([]byte, error) {
	if a.result == nil {
		a.result = a.makeResult()
	}
	r, err := a.result.GetAsVersion(a.version)
	if err != nil {
		return nil, fmt.Errorf("convert result to version %s: %w", a.version, err)
	}
	var out bytes.Buffer
	if err := r.PrintTo(&out); err != nil {
		return nil, fmt.Errorf("encode result: %w", err)
	}
	return out.Bytes(), nil
}

func (a *addition) printResult(context.Context) error {
	out, err := a.encodeResult()
	if err != nil {
		return err
	}
	if _, err := a.stdout.Write(out); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// toCurrent converts a result that somebody else wrote. The library's conversion from older versions panics at a null
// where an object should be; newer ones let it through.
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

// toPrefix converts n; what it can't convert becomes the invalid prefix. An IPv4 address with an IPv6 mask is one.
func toPrefix(n *net.IPNet) netip.Prefix {
	ones, bits := n.Mask.Size()
	a := toAddr(n.IP)
	if !a.IsValid() || bits != a.BitLen() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(a, ones).Masked()
}
