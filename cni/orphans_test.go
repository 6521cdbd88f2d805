package cni

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// What no step of ADD or DEL leaves, but a person or a fault can.
func TestSweepTakesWhatBelongsToNothing(t *testing.T) {
	w, other, before := neighboured(t)
	const dead = 9999
	p := w.newPod()

	e, err := endpoints.Open(w.pins.Map(endpoints.Name))
	w.must(err)
	defer e.Close()
	for _, cidr := range podCIDRs {
		w.must(e.Put(endpoints.Key{Address: wire.AddrFrom(cidr.Addr().Next())}, endpoints.Value{Ifindex: dead}))
	}
	d, err := devices.Open(w.pins.Map(devices.Name))
	w.must(err)
	defer d.Close()
	w.must(d.Put(devices.Key{Ifindex: dead}, devices.Value{}))
	world := devices.Key{Ifindex: devices.World} // of no link, and the agent's
	w.must(d.Put(world, devices.Value{}))
	w.must(os.WriteFile(filepath.Join(endpoint.Dir(w.stateDir), p.id.String()+".json.tmp"), []byte("{"), 0o600))
	link, err := w.host.CreateVeth(device.Veth{
		Name: p.id.HostLinkName(), MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, PeerName: "eth0",
		PeerMAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, PeerNS: p.ns, MTU: 1400,
	})
	w.must(err)
	w.must(d.Put(devices.Key{Ifindex: uint32(link.Index)}, devices.Value{}))
	uplink := filepath.Join(w.pins.Links(), "from_uplink_9999")
	w.must(os.Rename(w.pinOfADeadLink(), w.pins.Link(string(attach.FromPod), dead)))
	w.must(os.Link(w.pins.Link(string(attach.FromPod), dead), uplink))

	w.must(endpoint.Releaser{StateDir: w.stateDir, Pins: w.pins}.RemoveOrphans(map[endpoint.ID]bool{p.id: true}))
	if !w.hostLink(p).exists {
		t.Error("a link that is to be kept was deleted")
	}
	w.ok("GC", nil, gcList(other))
	if _, err := os.Lstat(uplink); !os.IsNotExist(err) {
		t.Errorf("the pin of an uplink that is gone: %v, want none", err)
	}
	_, err = d.Get(world)
	w.must(err)
	w.must(d.Delete(world))
	w.unchanged(before)
}

// pinOfADeadLink makes a pod, destroys its namespace and returns the pin of its program.
func (w *fixture) pinOfADeadLink() string {
	w.t.Helper()
	p := w.newPod()
	w.killed(p, "device entry")
	l, err := w.host.LinkByName(p.id.HostLinkName())
	w.must(err)
	w.destroy(p)
	s, err := ipam.Open(w.stateDir, "net1", ipam.Options{})
	w.must(err)
	_, err = s.Release(w.t.Context(), ipam.Owner(p.id))
	w.must(err)
	return w.pins.Link(string(attach.FromPod), l.Index)
}

// resting is how many addresses rest.
func (w *fixture) resting() (n int) {
	w.t.Helper()
	list, err := ipam.List(w.stateDir)
	w.must(err)
	for _, e := range list {
		if e.State == ipam.Quarantined {
			n++
		}
	}
	return n
}

// A pod can have sent something as soon as its link was up. Backwards, so that an ADD whose address needs no quarantine
// meets those that are in it.
func TestAddressesOfFailedAdds(t *testing.T) {
	w := newFixture(t)
	w.conf["addressQuarantine"] = "0s"
	names, _ := w.steps()
	w.conf["addressQuarantine"] = "1h"
	want := 0
	for i, step := range slices.Backward(names) {
		if i > slices.Index(names, "link state") {
			want++
		}
		if _, e := w.call("ADD", w.newPod(), nil, failAt+"="+step); e == nil {
			t.Errorf("ADD did not fail before %q", step)
		}
		if rest := w.resting(); rest != want {
			t.Errorf("failed before %q: now %d addresses rest, want %d", step, rest, want)
		}
	}
	if want == 0 {
		t.Error("no step comes after the link was up: this shows nothing")
	}
}

func TestFreedAddressesRest(t *testing.T) {
	w := newDual(t)
	w.conf["addressQuarantine"] = "1h"
	w.conf["ipam"] = map[string]any{"type": "host-local", "ranges": [][]any{ // five each, without the gateway
		{map[string]any{"subnet": "10.9.0.0/29"}}, {map[string]any{"subnet": "fd00:9::/125", "rangeEnd": "fd00:9::6"}},
	}}
	first := w.newPod()
	given := w.add(first, nil).IPs
	w.ok("DEL", first, nil)
	freed := time.Now()
	if n := w.resting(); n != len(given) {
		t.Errorf("%d addresses rest after a DEL, want %d", n, len(given))
	}
	for i := range 5 {
		for f, ip := range w.add(w.newPod(), nil).IPs {
			last, again := i == 4, ip.Address.String() == given[f].Address.String()
			if again != last || time.Since(freed) > time.Hour {
				t.Errorf("pod %d got %s; %s rests, and is for the fifth, for which no other is left", i+1, ip.Address.String(), given[f].Address.String())
			}
		}
	}
	w.refused(codeNoAddress, "ADD", w.newPod(), nil, "10.9.0.1-10.9.0.6")
	w.conf["ipam"].(map[string]any)["ranges"].([][]any)[0][0] = map[string]any{"subnet": "10.9.0.0/28"}
	w.refused(codeNoAddress, "ADD", w.newPod(), nil, "fd00:9::1-fd00:9::6")
}
