package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
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

// linkTimeout is how long the kernel may take to activate a link. It takes microseconds, before Linux 6.8
// milliseconds, and with a hundred pods at once seconds, which each wait for the lock of all links (RTNL).
const linkTimeout = 20 * time.Second

// linkGone returns why the link of that name is not the endpoint's, empty if it is.
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
		return nil
	}
	w.compareKind("host's", w.Link)
	if w.Link.MTU != w.MTU {
		w.Wrong("the host's interface %s has MTU %d instead of %d", w.HostName, w.Link.MTU, w.MTU)
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

// setting is a sysctl with the value that it has to have.
type setting struct{ name, value string }

// sysctls are those of the host's end. With rp_filter strict (1) the kernel refuses every source but the pod's, whose
// route leads back to this link, even while our program is not attached. The larger of this and the setting for all
// interfaces applies, but on a link without an address loose (2) is as strict. The kernel has no such filter for IPv6.
func (w *Work) sysctls() []setting {
	all := []setting{{w.rpFilter(), "1"}, {w.forwarding(), "1"}}
	if !w.hasIPv6() {
		return all
	}
	ipv6 := "net/ipv6/conf/" + w.HostName + "/"
	return append(all,
		setting{ipv6 + "forwarding", "1"},
		setting{ipv6 + "accept_ra", "0"},
		setting{ipv6 + "addr_gen_mode", "1"}, // none: the gateway's address, for which the program answers, is all that pods see
		setting{ipv6 + "disable_ipv6", "0"},
	)
}

func (w *Work) hasIPv6() bool { return slices.ContainsFunc(w.Addresses, netip.Addr.Is6) }

func (w *Work) rpFilter() string   { return "net/ipv4/conf/" + w.HostName + "/rp_filter" }
func (w *Work) forwarding() string { return "net/ipv4/conf/" + w.HostName + "/forwarding" }

func (w *Work) haveSysctls() error {
	return forAll(w.sysctls(), func(s setting) error {
		have, err := w.readSysctl(s.name)
		return w.compareSysctl(s, have, err)
	})
}

// compareSysctl takes one that does not exist for no fault of its own: the kernel, or a link with a small MTU, has no IPv6.
func (w *Work) compareSysctl(s setting, have string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && have != s.value {
		w.Wrong("sysctl %s is %s instead of %s", s.name, have, s.value)
	}
	return err
}

func (w *Work) readSysctl(name string) (string, error) {
	listed := w.Settings.Index == w.HostIndex
	switch {
	case listed && name == w.rpFilter():
		return strconv.Itoa(w.Settings.RPFilter), nil
	case listed && name == w.forwarding():
		return strconv.Itoa(w.Settings.Forwarding), nil
	}
	return w.Sysctl.Get(name)
}

func (w *Work) setSysctls() error {
	return forAll(w.sysctls(), func(s setting) error {
		_, err := w.Sysctl.Set(s.name, s.value)
		if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(s.name, "net/ipv6/") {
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

// haveProgramToPod asks for nothing where Services are not served: a start without them takes the program off all pods.
func (w *Work) haveProgramToPod() error {
	if !w.servesServices() {
		return nil
	}
	ok, err := w.Programs.Attached(w.HostIndex, attach.ToPod)
	if !ok {
		w.Wrong("no program that sees what is sent to the pod is attached to %s", w.HostName)
	}
	return err
}

func (w *Work) attachProgramToPod() error {
	if !w.servesServices() {
		return nil
	}
	return w.Programs.Attach(w.HostIndex, attach.ToPod)
}

// detach runs after the link was deleted: what was attached is gone with the device, and removing the pin that is left
// takes no grace period.
func (w *Work) detach() error {
	if len(w.indexes) == 0 { // the link's index is not known
		return w.removeDead(w.ctx)
	}
	return forAll(w.indexes, func(index int) error {
		return forAll(attach.PodHooks(), func(hook attach.Hook) error { return attach.Attacher{Dir: w.Pins}.Detach(index, hook) })
	})
}

func (w *Work) deviceKey() devices.Key { return devices.Key{Ifindex: uint32(w.HostIndex)} }

// device is the link's devices entry: what the program has to know, with the counters of the given one.
func (w *Work) device(have devices.Value) devices.Value {
	have.PodMAC, have.HostMAC = w.PodMAC, w.HostMAC
	have.Addresses = wire.AddressesFrom(w.Addresses...)
	have.Netns = uint32(w.Link.PeerNS + 1)
	return have
}

func (w *Work) haveDevice() error {
	have, err := lookUp(w.Devices, w.deviceKey())
	want := w.device(have)
	for _, a := range w.Addresses {
		if have.Addresses[wire.FamilyOf(a)] != wire.AddrFrom(a) {
			w.Wrong("devices entry of link %s lacks address %s", w.HostName, a)
		} else if have != want {
			w.Wrong("devices entry of link %s is %+v instead of %+v", w.HostName, have, want)
		}
	}
	return err
}

// writeDevice writes which addresses the pod may send from. A wrong entry is replaced, with its counters except for what
// the programs add at that very moment.
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

// forgetDevice removes a link's entry. That of the world, which is no link, is the agent's.
func (n *Node) forgetDevice(index int) error {
	if n.Devices == nil || index == devices.World {
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

// setUp gives both ends a carrier, and waits until both run: the first packet that the pod sends must not be lost.
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

// haveNeighbours also compares the link's address: when that changes, the kernel forgets the link's neighbours.
func (w *Work) haveNeighbours() error {
	return w.each(func(a netip.Addr) error {
		is := func(n device.Neighbour) bool { return n.Is(a, w.PodMAC[:]) }
		if !bytes.Equal(w.Link.MAC, w.HostMAC[:]) || !slices.ContainsFunc(w.Neighbours, is) {
			w.Wrong("the host has no permanent neighbour %s", a)
		}
		return nil
	})
}

// writeNeighbours makes ARP and neighbour solicitations unnecessary: the pod's program would drop the answers.
func (w *Work) writeNeighbours() error {
	return w.each(func(a netip.Addr) error { return w.Host.ReplaceNeighbour(w.HostIndex, a, w.PodMAC[:]) })
}

// Route is the host's route to an address of the pod.
func (w *Work) Route(a netip.Addr) device.Route {
	return device.Route{Dst: hostPrefix(a), Index: w.HostIndex, Source: w.Sources[wire.FamilyOf(a)].Netip()}
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

// writeRoutes replaces any other route for a pod that exists, and none for a new one.
func (w *Work) writeRoutes() error {
	write := w.Host.ReplaceRoute
	if w.fresh {
		write = w.Host.AddRoute
	}
	return w.each(func(a netip.Addr) error {
		r := w.Route(a)
		err := write(r)
		if r.Source.IsValid() && errors.Is(err, unix.EINVAL) {
			w.log().Warn("the node's address is on no interface, route to a pod written without it as its source", "address", r.Source)
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
			return w.Host.DeleteRoute(device.Route{Dst: hostPrefix(a), Index: index})
		})
	})
}
