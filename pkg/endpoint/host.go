package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// ErrNameTaken is returned (wrapped) by Make when the pod has an interface of that name already.
var ErrNameTaken = errors.New("the name is taken")

// linkTimeout is how long the kernel may take to activate a link; it is a matter of microseconds, or of milliseconds
// before Linux 6.8.
const linkTimeout = 5 * time.Second

// linkGone says that the link of that name is not the endpoint's; empty: it is.
func (w *Work) linkGone() string {
	switch w.Link.Index {
	case w.HostIndex:
		return ""
	case 0:
		return fmt.Sprintf("the host has no interface %s", w.HostName)
	}
	return fmt.Sprintf("link %s has index %d instead of %d", w.HostName, w.Link.Index, w.HostIndex)
}

func (w *Work) haveLink() error {
	if gone := w.linkGone(); gone != "" {
		w.Wrong("%s", gone)
	} else {
		w.compareShape("host's", w.Link)
	}
	return nil
}

func (w *Work) createLink() (err error) {
	w.Link, err = w.Host.CreateVeth(device.Veth{
		Name: w.HostName, MAC: w.HostMAC[:], PeerName: w.IfName, PeerMAC: w.PodMAC[:], PeerNS: w.Namespace, MTU: w.MTU,
	})
	w.HostIndex = w.Link.Index
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%w: %w", ErrNameTaken, err)
	}
	return err
}

// sysctls have to be 1. Strict rp_filter: the route to the pod's address leads back here, so the kernel refuses every
// other source while our program is off the link. The larger of this and the setting for all interfaces counts, but on a
// link without an address loose is as strict.
func (w *Work) sysctls() []string {
	names := []string{"net/ipv4/conf/" + w.HostName + "/rp_filter", "net/ipv4/conf/" + w.HostName + "/forwarding"}
	if slices.ContainsFunc(w.Addresses, netip.Addr.Is6) {
		names = append(names, "net/ipv6/conf/"+w.HostName+"/forwarding")
	}
	return names
}

func (w *Work) haveSysctls() error {
	return forAll(w.sysctls(), func(name string) error {
		have, err := w.Sysctl.Get(name)
		if errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6 has none of its own
			return nil
		}
		if have != "1" {
			w.Wrong("sysctl %s is %s instead of 1", name, have)
		}
		return err
	})
}

func (w *Work) setSysctls() error {
	return forAll(w.sysctls(), func(name string) error {
		_, err := w.Sysctl.Set(name, "1")
		if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(name, "net/ipv6/") {
			return nil
		}
		return err
	})
}

func (w *Work) haveProgram() error {
	ok, err := w.Programs.Attached(w.HostIndex, attach.FromPod)
	if !ok {
		w.Wrong("no program is attached to %s", w.HostName)
	}
	return err
}

func (w *Work) attachProgram() error { return w.Programs.Attach(w.HostIndex, attach.FromPod) }

// detach finds the program of a link that is gone: what was attached went with the device, and only its pin is left,
// which costs no grace period.
func (w *Work) detach() error {
	if len(w.indexes) == 0 { // no file says which link it was
		return w.sweepDead()
	}
	return forAll(w.indexes, func(index int) error {
		return attach.Attacher{Dir: w.Pins}.Detach(index, attach.FromPod)
	})
}

func (w *Work) deviceKey() devices.Key { return devices.Key{Ifindex: uint32(w.HostIndex)} }

// device is what the program has to know of the link, with the counters that it has.
func (w *Work) device(have devices.Value) devices.Value {
	have.PodMAC, have.HostMAC = w.PodMAC, w.HostMAC
	have.SetAddresses(w.Addresses)
	return have
}

func (w *Work) haveDevice() error {
	have, err := lookUp(w.Devices, w.deviceKey())
	want := w.device(have)
	for _, a := range w.Addresses {
		if key := wire.AddrFrom(a); have.IPv4 != key && have.IPv6 != key {
			w.Wrong("devices entry of link %s lacks address %s", w.HostName, a)
		} else if have != want {
			w.Wrong("devices entry of link %s is %+v instead of %+v", w.HostName, have, want)
		}
	}
	return err
}

// writeDevice tells the program what the pod may send from. An entry that is wrong keeps its counters, but for what the
// programs add in that very moment.
func (w *Work) writeDevice() error {
	err := w.Devices.Insert(w.deviceKey(), w.device(devices.Value{}))
	if !errors.Is(err, typed.ErrKeyExist) {
		return err
	}
	have, err := w.Devices.Get(w.deviceKey())
	if err != nil || have == w.device(have) {
		return err
	}
	return w.Devices.Put(w.deviceKey(), w.device(have))
}

func (w *Work) forgetDevices() error { return forAll(w.indexes, w.forgetDevice) }

func (n *Node) forgetDevice(index int) error {
	if n.Devices == nil {
		return nil
	}
	return n.Devices.Delete(devices.Key{Ifindex: uint32(index)})
}

func (w *Work) haveMAC() error {
	w.compareMAC("host's", w.Link, w.HostMAC)
	return nil
}

func (w *Work) setMAC() error {
	if w.fresh {
		return nil // the link was made with it
	}
	return w.Host.SetMAC(w.HostIndex, w.HostMAC[:])
}

func (w *Work) haveUp() error {
	w.compareUp("host's", w.Link)
	return nil
}

// setUp is what gives both ends a carrier. The first packet that the pod sends must not be lost.
func (w *Work) setUp() error {
	w.WasUp = true
	if err := w.Host.SetUp(w.HostIndex); err != nil || !w.fresh {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), linkTimeout)
	defer cancel()
	return errors.Join(w.Host.WaitRunning(ctx, w.HostIndex), w.Inside.WaitRunning(ctx, w.Link.PeerIndex))
}

func (w *Work) deleteLink() error {
	if w.link == 0 {
		return nil
	}
	err := w.Host.DeleteLink(w.link)
	w.linkStays = err != nil
	return err
}

// haveNeighbours: the kernel forgets the neighbours of a link whose address changes.
func (w *Work) haveNeighbours() error {
	return w.each(func(a netip.Addr) error {
		is := func(n device.Neighbour) bool { return n.Is(a, w.PodMAC[:]) }
		if !bytes.Equal(w.Link.MAC, w.HostMAC[:]) || !slices.ContainsFunc(w.Neighbours, is) {
			w.Wrong("the host has no permanent neighbour %s", a)
		}
		return nil
	})
}

// writeNeighbours saves the host from asking: the pod's answer to an ARP request would have to pass a program that lets
// nothing but IP out of a pod.
func (w *Work) writeNeighbours() error {
	return w.each(func(a netip.Addr) error { return w.Host.ReplaceNeighbour(w.HostIndex, a, w.PodMAC[:]) })
}

// Route is the host's own way to an address of the pod.
func (w *Work) Route(a netip.Addr) device.Route {
	r := device.Route{Dst: whole(a), Index: w.HostIndex}
	if a.Is4() {
		r.Source = w.Source
	}
	return r
}

func (w *Work) haveRoutes() error {
	return w.each(func(a netip.Addr) error {
		want := w.Route(a)
		is := func(r device.Route) bool {
			return r.Protocol == device.Protocol && r.Index == want.Index && r.Dst == want.Dst
		}
		if i := slices.IndexFunc(w.LinkRoutes, is); i < 0 {
			w.Wrong("the host has no route to %s", a)
		} else if have := w.LinkRoutes[i].Source; have != want.Source {
			w.Wrong("the host's route to %s has source %s instead of %s", a, have, want.Source)
		}
		return nil
	})
}

// writeRoutes puts the way to a living pod in the place of any other route, and that to a new one in nobody's.
func (w *Work) writeRoutes() error {
	write := w.Host.ReplaceRoute
	if w.fresh {
		write = w.Host.AddRoute
	}
	return w.each(func(a netip.Addr) error {
		r := w.Route(a)
		err := write(r)
		if r.Source.IsValid() && errors.Is(err, unix.EINVAL) {
			w.log().Warn("the node's address is on no interface, route written without it", "address", r.Source)
			r.Source = netip.Addr{}
			err = write(r)
		}
		if errors.Is(err, unix.EEXIST) {
			return w.routeTaken(a)
		}
		return err
	})
}

func (w *Work) deleteRoutes() error {
	return forAll(w.indexes, func(index int) error {
		return forAll(w.Addresses, func(a netip.Addr) error {
			return w.Host.DeleteRoute(device.Route{Dst: whole(a), Index: index})
		})
	})
}
