package cni

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// delegating is a node whose addresses come from the fake ipam plugin.
type delegating struct {
	*fixture
	dir    string // the fake plugin's
	before []string
}

func newDelegating(t *testing.T) delegating {
	t.Helper()
	return delegatingOn(newFixture(t))
}

func delegatingOn(w *fixture) delegating {
	w.t.Helper()
	d := delegating{fixture: w, dir: w.t.TempDir(), before: w.everything()}
	w.env = []string{fakeIPAM + "=" + d.dir}
	w.conf["ipam"] = map[string]any{"type": ipamName}
	return d
}

// leave writes a file that steers the fake plugin.
func (d delegating) leave(name, content string) {
	d.t.Helper()
	d.must(os.WriteFile(filepath.Join(d.dir, name), []byte(content), 0o600))
}

func (d delegating) answer(ips ...string) {
	d.t.Helper()
	var list []any
	for _, ip := range ips {
		list = append(list, map[string]any{"address": ip, "gateway": "172.20.0.1"})
	}
	raw, err := json.Marshal(map[string]any{"cniVersion": "1.1.0", "ips": list})
	d.must(err)
	d.leave("answer", string(raw))
}

// asked are the commands that the fake plugin got since the last call.
func (d delegating) asked(want ...string) {
	d.t.Helper()
	raw, _ := os.ReadFile(filepath.Join(d.dir, "commands"))
	_ = os.Remove(filepath.Join(d.dir, "commands"))
	var got []string
	for line := range strings.Lines(string(raw)) {
		got = append(got, strings.Fields(line)[0])
	}
	if !slices.Equal(got, want) {
		d.t.Errorf("the ipam plugin was asked for %v, want %v", got, want)
	}
}

func TestDelegatedIPAM(t *testing.T) {
	d := newDelegating(t)
	m, err := destinations.Open(d.pins.Map(destinations.Name))
	d.must(err)
	defer m.Close()
	for _, ips := range [][]string{{"172.20.3.4/16"}, {"fd00:20::4/64"}, {"172.20.3.4/16", "fd00:20::4/64"}, {"fd00:20::4/64", "172.20.3.4/16"}} {
		d.answer(ips...)
		p := d.newPod()
		r := d.add(p, nil)
		d.asked("ADD")
		for i, ip := range ips {
			a := netip.MustParsePrefix(ip).Addr()
			if got := r.IPs[i]; got.Address.String() != whole(a).String() || got.Gateway.String() != gateways[wire.FamilyOf(a)].String() {
				t.Errorf("addresses %v", r.IPs)
			}
			if v, err := m.Get(destinations.KeyFrom(whole(a))); err != nil || v.Kind != destinations.Local {
				t.Errorf("destinations entry of an address outside the podCIDR: %+v, %v", v, err)
			}
		}
		d.add(p, nil)
		d.asked() // the same result without asking again
		d.ok("CHECK", p, prevResult(t, r))
		d.asked("CHECK")
		last := netip.MustParsePrefix(ips[len(ips)-1]).Addr()
		d.must(m.Delete(destinations.KeyFrom(whole(last))))
		d.refused(codeCheckFailed, "CHECK", p, prevResult(t, r), "destinations entry of "+last.String())
		d.ok("DEL", p, nil)
		d.asked("DEL")
		d.unchanged(d.before)
	}

	d.ok("STATUS", nil, nil)
	d.ok("GC", nil, gcList())
	d.asked("STATUS", "GC")
}

// TestDelegatedIPAMGetsItsAddressBack: whatever goes wrong after its ADD, the other plugin is told by a DEL.
func TestDelegatedIPAMGetsItsAddressBack(t *testing.T) {
	d := newDelegating(t)
	for _, bad := range [][]string{
		nil, {"0.0.0.0/0"}, {"127.0.0.1/8"}, {"224.0.0.1/4"}, {"172.20.3.4/16", "172.20.3.5/16"},
		{"::/0"}, {"::1/128"}, {"ff02::1/16"}, {"fe80::4/64"}, {"fd00:20::4/64", "fd00:20::5/64"}, {"172.20.3.4/16", "fe80::4/64"},
	} {
		d.answer(bad...)
		if _, e := d.call("ADD", d.newPod(), nil); e == nil {
			t.Errorf("addresses %v were accepted", bad)
		}
		d.asked("ADD", "DEL")
	}
	for _, version := range []string{"0.4.0", "1.1.0"} {
		d.leave("answer", `{"cniVersion":"`+version+`","ips":[null],"interfaces":[null]}`)
		d.refused(999, "ADD", d.newPod(), nil, ipamName, "malformed")
		d.asked("ADD", "DEL")
	}
	d.answer("172.20.3.4/16")
	if _, e := d.call("ADD", d.newPod(), nil, failAt+"=route"); e == nil {
		t.Error("made to fail, and succeeded")
	}
	d.asked("ADD", "DEL")
	d.unchanged(d.before)
}

// What the agent says is the host's, as the tunnel's address is, which another plugin may take for a pod's.
func TestDelegatedIPAMGetsNoAddressOfTheHosts(t *testing.T) {
	d := newDelegating(t)
	m, err := destinations.Open(d.pins.Map(destinations.Name))
	d.must(err)
	defer m.Close()
	for _, cidr := range podCIDRs {
		d.must(m.Put(destinations.KeyFrom(whole(cidr.Addr())), destinations.Value{Kind: destinations.Host}))
		d.answer(cidr.String())
		d.refused(codeNoAddress, "ADD", d.newPod(), nil, cidr.Addr().String(), "this node itself")
		d.asked("ADD", "DEL")
	}
}

func TestDelegatedIPAMAfterAKill(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	for _, step := range []string{"pod", "endpoint entry"} {
		p := d.newPod()
		d.killed(p, step)
		d.add(p, nil) // in spite of what the killed one left
		d.ok("DEL", p, nil)
		d.asked("ADD", "ADD", "DEL")
	}
	d.unchanged(d.before)
}

func TestDelegatedIPAMRefuses(t *testing.T) {
	d := newDelegating(t)
	d.leave("refuse-ADD", `{"code":123,"msg":"not today"}`)
	d.refused(123, "ADD", d.newPod(), nil, "not today")
	d.leave("refuse-STATUS", `{"code":50,"msg":"no server"}`)
	d.refused(50, "STATUS", nil, nil, "no server", ipamName)
	d.leave("refuse-GC", `{"code":4,"msg":"unknown CNI_COMMAND: GC"}`)
	d.ok("GC", nil, gcList())
	d.unchanged(d.before)
}

// An ipam plugin that is just being written in place can't be executed until that is done.
func TestDelegatedIPAMWhileItIsUpdated(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	path := filepath.Join(d.plugins, ipamName)
	program, err := os.ReadFile(path)
	d.must(err)
	d.must(os.Remove(path))
	update, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o700) //nolint:gosec // a program
	d.must(err)
	_, err = update.Write(program)
	d.must(err)
	p := d.newPod()
	conf, err := json.Marshal(d.conf)
	d.must(err)
	wait := d.start("ADD", p, conf)
	time.Sleep(500 * time.Millisecond) // long enough for the plugin to meet the file as it is
	d.must(update.Close())
	if out, err := wait(); err != nil {
		t.Errorf("ADD during an update: %v\n%s", err, out)
	}
	d.asked("ADD")
	d.ok("DEL", p, nil)
	d.asked("DEL")
	d.unchanged(d.before)
}
