package endpoint

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// Gateway is the pods' only next hop. No interface has the address: a permanent neighbour entry of the pod maps it to
// the host's end of the veth.
func Gateway(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 1, 1})
	}
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: 1})
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// podRoutes are all routes of the pod, over its interface of that index.
func (w *Work) podRoutes(index int) (all []device.Route) {
	for _, a := range w.Addresses {
		all = append(all, device.Route{Dst: hostPrefix(Gateway(a))})
	}
	all = append(all, w.Routes...)
	for i := range all {
		all[i].Index, all[i].Foreign = index, true
	}
	return all
}

// configurePod configures the pod's addresses and routes. Routes need the pod's end to be up; the pair carries nothing
// while the host's end is down. The index of the pod's end is known from the host's: a lookup in the pod would wait once
// more for the kernel's lock of all links (RTNL), which attaching other pods' programs holds for milliseconds.
func (w *Work) configurePod() error {
	index := w.Link.PeerIndex
	if err := w.enableIPv6(); err != nil {
		return err
	}
	if err := w.Inside.SetUp(index); err != nil {
		return err
	}
	for _, a := range w.Addresses {
		if err := w.Inside.AddAddress(index, hostPrefix(a)); err != nil {
			return err
		}
		if err := w.Inside.ReplaceNeighbour(index, Gateway(a), w.HostMAC[:]); err != nil {
			return err
		}
	}
	for _, r := range w.podRoutes(index) {
		if err := w.Inside.ReplaceRoute(r); err != nil {
			return err
		}
	}
	return nil
}

// enableIPv6 enables IPv6 for a pod that has an IPv6 address: container engines disable it in new namespaces.
func (w *Work) enableIPv6() error {
	if !slices.ContainsFunc(w.Addresses, netip.Addr.Is6) {
		return nil
	}
	return w.Namespace.Do(func() error {
		_, err := device.Sysctl{}.Set("net/ipv6/conf/"+w.IfName+"/disable_ipv6", "0")
		return err
	})
}

func (w *Work) havePod() error {
	l, err := w.Inside.LinkByName(w.IfName)
	if errors.Is(err, device.ErrNotFound) {
		w.Wrong("the pod has no interface %s", w.IfName)
		return nil
	}
	if err != nil {
		return err
	}
	w.compareKind("pod's", l)
	w.compareMTU(l)
	w.compareUp("pod's", l)
	w.compareMAC("pod's", l, w.InsideMAC)
	if l.PeerIndex != w.HostIndex {
		w.Wrong("the pod's interface %s is not the other end of %s", l.Name, w.HostName)
	}
	addresses, err := w.Inside.Addresses()
	for _, a := range slices.Concat(w.Addresses, w.Others) {
		if !slices.ContainsFunc(addresses, func(x device.Address) bool { return x.Index == l.Index && x.Prefix.Addr() == a }) {
			w.Wrong("the pod's interface %s lacks address %s", l.Name, a)
		}
	}
	return errors.Join(err, w.havePodRoutes(l.Index))
}

// havePodRoutes checks the pod's routes and neighbours.
func (w *Work) havePodRoutes(index int) error {
	routes, err1 := w.Inside.Routes()
	for _, want := range w.podRoutes(index) {
		if !slices.ContainsFunc(routes, func(r device.Route) bool {
			return r.Dst == want.Dst && r.Index == index && r.Gateway == want.Gateway
		}) {
			w.Wrong("the pod has no route to %s", want.Dst)
		}
	}
	if w.MACChanged { // the kernel has forgotten the neighbours; the program answers ARP
		return err1
	}
	neighbours, err2 := w.Inside.Neighbours(index)
	for _, a := range w.Addresses {
		if !slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(Gateway(a), w.HostMAC[:]) }) {
			w.Wrong("the pod has no permanent neighbour %s", Gateway(a))
		}
	}
	return errors.Join(err1, err2)
}

// compareMTU accepts a smaller MTU than ADD's: it is another plugin's, and the specification's results say nothing of it.
func (w *Work) compareMTU(l device.Link) {
	if l.MTU > w.MTU {
		w.Wrong("the pod's interface %s has MTU %d, more than the %d of its other end", l.Name, l.MTU, w.MTU)
	}
	for _, a := range w.Addresses {
		if least := MinMTU(a); l.MTU < least {
			w.Wrong("the pod's interface %s has MTU %d, address %s needs at least %d", l.Name, l.MTU, a, least)
		}
	}
}

func (w *Work) compareKind(whose string, l device.Link) {
	if l.Kind != "veth" {
		w.Wrong("the %s interface %s is a %s", whose, l.Name, l.Kind)
	}
}

func (w *Work) compareUp(whose string, l device.Link) {
	if !l.Up() {
		w.Wrong("the %s interface %s is down", whose, l.Name)
	}
}

func (w *Work) compareMAC(whose string, l device.Link, mac wire.MAC) {
	if !bytes.Equal(l.MAC, mac[:]) {
		w.Wrong("the %s interface %s has Ethernet address %s instead of %s", whose, l.Name, l.MAC, mac)
	}
}
