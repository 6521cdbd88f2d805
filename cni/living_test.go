package cni

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// What the kernel would change or refuse; the result would name an interface that is not there.
func TestInterfaceNamesThatTheKernelWouldChange(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	for _, name := range []string{"eth%d", "%d", "eth%", "a%sb", "eth%d%d", "all", "default", "à"} {
		p := w.newPod()
		p.id.IfName = name
		w.refused(4, "ADD", p, nil, name)
		w.ok("DEL", p, nil) // of the refused ADD
	}
	w.unchanged(before)
	p := w.newPod()
	p.id.IfName = "net1.2-x_é"
	w.ok("CHECK", p, prevResult(t, w.add(p, nil)))
}

// brokenPin puts a map in the place of another one, whose lookups fail, and returns what puts it right again.
func (w *fixture) brokenPin(name string) func() {
	w.t.Helper()
	path := w.pins.Map(name)
	was, err := ebpf.LoadPinnedMap(path, nil)
	w.must(err)
	w.must(os.Remove(path))
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 7, ValueSize: 7, MaxEntries: 1})
	w.must(err)
	w.must(m.Pin(path))
	w.must(m.Close())
	return func() {
		w.must(os.Remove(path))
		again, err := was.Clone()
		w.must(err)
		w.must(again.Pin(path))
		w.must(errors.Join(again.Close(), was.Close()))
	}
}

// An ADD that is repeated and can't find out how the pod is leaves it alone.
func TestRepeatedAddSparesARunningPod(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	r := w.add(p, nil)
	before := w.everything()
	spared := func(what string, e string) {
		t.Helper()
		if e == "" {
			t.Errorf("%s: ADD succeeded", what)
		}
		w.unchanged(before)
		w.ok("CHECK", p, prevResult(t, r))
	}
	fails := func() string {
		if _, e := w.call("ADD", p, nil); e != nil {
			return e.Error()
		}
		return ""
	}
	for _, name := range []string{devices.Name, endpoints.Name} {
		mend := w.brokenPin(name)
		e := fails()
		mend()
		spared(name, e)
	}
	state := filepath.Join(endpoint.Dir(w.stateDir), p.id.String()+".json")
	w.must(os.Rename(state, state+".away"))
	e := fails() // its state is lost
	w.must(os.Rename(state+".away", state))
	spared("without state", e)
	good, err := os.ReadFile(state)
	w.must(err)
	w.must(os.WriteFile(state, []byte("{"), 0o600))
	e = fails()
	w.must(os.WriteFile(state, good, 0o600))
	spared("unreadable state", e)

	m := w.openEndpoints()
	address, _ := entryOf(w, p)
	v, err := m.Get(address)
	w.must(err)
	lo, err := w.host.LinkByName("lo")
	w.must(err)
	w.must(m.Put(address, endpoints.Value{Ifindex: uint32(lo.Index)})) // its address is another's now
	e = fails()
	w.must(m.Put(address, v))
	spared("address taken", e)
	if got := w.add(p, nil); got.IPs[0].Address.String() != r.IPs[0].Address.String() {
		t.Errorf("another address: %v", got.IPs)
	}
}

func entryOf(w *fixture, p *pod) (endpoints.Key, endpoint.Endpoint) {
	w.t.Helper()
	e, err := endpoint.Read(w.stateDir, p.id)
	w.must(err)
	return endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}, e
}

// undeletable puts a link that the kernel does not delete in the place of the pod's.
func (w *fixture) undeletable(p *pod) {
	w.t.Helper()
	l, err := w.host.LinkByName(p.id.HostLinkName())
	w.must(err)
	w.must(w.host.DeleteLink(l.Index))
	lo, err := netlink.LinkByName("lo")
	w.must(err)
	w.must(netlink.LinkSetDown(lo))
	w.must(netlink.LinkSetName(lo, p.id.HostLinkName()))
}

func TestAddressStaysTakenWhileItsLinkExists(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	w.add(p, nil)
	w.undeletable(p)
	for verb, conf := range map[string]map[string]any{"DEL": nil, "GC": gcList()} {
		if _, e := w.call(verb, p, conf); e == nil {
			t.Errorf("%s succeeded although the link is there", verb)
		}
		if used := w.used(); len(used) != 1 {
			t.Errorf("%s: in use are %v, want the address of the pod whose link is there", verb, used)
		}
		if !w.hasState(p) {
			t.Errorf("%s: the state file is gone", verb)
		}
	}
}

func TestDelegatedAddressStaysTakenWhileItsLinkExists(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	p := d.newPod()
	d.add(p, nil)
	d.undeletable(p)
	for verb, conf := range map[string]map[string]any{"DEL": nil, "GC": gcList()} {
		if _, e := d.call(verb, p, conf); e == nil {
			t.Errorf("%s succeeded although the link is there", verb)
		}
	}
	d.asked("ADD")
}

// A plugin that does not answer, and whose child keeps its output open.
func TestDelegatedIPAMHasADeadline(t *testing.T) {
	d := newDelegating(t)
	d.env = append(d.env, ipamWait+"=300ms")
	d.leave("hang-ADD", "")
	start := time.Now()
	d.refused(11, "ADD", d.newPod(), nil, ipamName, "300ms")
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("ADD took %v", took)
	}
	d.asked("ADD", "DEL") // it may have given an address before it hung
	d.unchanged(d.before)

	d.must(os.Remove(filepath.Join(d.dir, "hang-ADD")))
	d.answer("172.20.3.4/16")
	p := d.newPod()
	d.add(p, nil)
	d.leave("hang-DEL", "")
	d.refused(11, "DEL", p, nil, ipamName)
	d.must(os.Remove(filepath.Join(d.dir, "hang-DEL")))
	d.ok("DEL", p, nil)
	d.unchanged(d.before)
}

// It is waited for once, not once for each pod that GC releases.
func TestGCWaitsOnceForAnIPAMPlugin(t *testing.T) {
	d := newDelegating(t)
	d.env = append(d.env, ipamWait+"=1s")
	for _, a := range []string{"172.20.3.4/16", "172.20.3.5/16", "172.20.3.6/16", "172.20.3.7/16"} {
		d.answer(a)
		d.add(d.newPod(), nil)
	}
	d.asked("ADD", "ADD", "ADD", "ADD")
	d.leave("hang-DEL", "")
	start := time.Now()
	d.refused(11, "GC", nil, gcList(), ipamName, "4 of 4 pods not given back, for 3 of them the ipam plugin was not called")
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("GC took %v", took)
	}
	d.asked("DEL") // and it is not asked for its own GC
	d.must(os.Remove(filepath.Join(d.dir, "hang-DEL")))

	// One that answers is asked for all, and says why not once.
	d.leave("refuse-DEL", `{"code":123,"msg":"not today"}`)
	d.refused(123, "GC", nil, gcList(), "4 of 4 pods not given back, for 0 of them the ipam plugin was not called", "not today")
	d.asked("DEL", "DEL", "DEL", "DEL", "GC")
	d.must(os.Remove(filepath.Join(d.dir, "refuse-DEL")))
	d.ok("GC", nil, gcList())
	d.asked("DEL", "DEL", "DEL", "DEL", "GC")
	d.unchanged(d.before)
}

// A link that somebody renamed is still the pod's.
func TestRenamedLinkIsDeleted(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	p := w.newPod()
	w.add(p, nil)
	l, err := netlink.LinkByName(p.id.HostLinkName())
	w.must(err)
	w.must(netlink.LinkSetName(l, "renamed"))
	w.ok("DEL", p, nil)
	w.unchanged(before)
}
