package cni

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

const contested = "10.9.0.9"

var (
	contestedAddr = netip.MustParseAddr(contested)
	contestedKey  = endpoints.Key{Address: wire.AddrFrom(contestedAddr)}
	askContested  = "CNI_ARGS=IP=" + contested + ";K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web"
	otherNetwork  = map[string]any{"name": "net2"} // with the same range
)

// refusedAsTaken is an ADD that must be refused, leave no trace and name the holder.
func (w *fixture) refusedAsTaken(conf map[string]any, words ...string) {
	w.t.Helper()
	before := w.everything()
	_, e := w.call("ADD", w.newPod(), conf, askContested)
	w.isError(e, codeNoAddress, append(words, contested)...)
	w.unchanged(before)
}

func (w *fixture) openEndpoints() *endpoints.Map {
	w.t.Helper()
	m, err := endpoints.Open(w.pins.Map(endpoints.Name))
	w.must(err)
	w.t.Cleanup(func() { m.Close() })
	return m
}

func TestAddressOfALivingPodIsRefused(t *testing.T) {
	w := newFixture(t)
	holder := w.newPod()
	r := w.add(holder, nil, askContested)
	who := []string{"shop/web", holder.id.ContainerID, holder.id.IfName, holder.id.HostLinkName()}
	w.refusedAsTaken(otherNetwork, who...)
	w.ok("CHECK", holder, prevResult(t, r))

	// What the agent has not repaired yet must not be taken either.
	m := w.openEndpoints()
	v, err := m.Get(contestedKey)
	w.must(err)
	w.must(m.Delete(contestedKey))
	w.refusedAsTaken(otherNetwork, who...)
	w.must(m.Put(contestedKey, v))
	w.ok("CHECK", holder, prevResult(t, r))

	w.ok("DEL", holder, nil)
	w.add(w.newPod(), otherNetwork, askContested)
}

func TestAddressOfALivingPodIsRefusedToADelegatedIPAM(t *testing.T) {
	d := newDelegating(t)
	holder := d.newPod()
	local := hostLocal(nil)
	r := d.add(holder, local, askContested)
	d.answer(contested + "/24")
	d.refusedAsTaken(otherNetwork, "shop/web", holder.id.ContainerID)
	d.asked("ADD", "DEL")
	maps.Copy(local, prevResult(t, r))
	d.ok("CHECK", holder, local)
}

// Nobody can be named then, but the way to it.
func TestAddressThatLeadsElsewhereIsRefused(t *testing.T) {
	w := newFixture(t)
	w.must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "elsewhere"}, PeerName: "there"}))
	l, err := w.host.LinkByName("elsewhere")
	w.must(err)
	w.must(w.host.SetUp(l.Index))
	way := device.Route{Dst: whole(contestedAddr), Index: l.Index}
	w.must(w.host.ReplaceRoute(way))
	w.refusedAsTaken(nil, "route", "elsewhere")
	w.must(w.host.DeleteRoute(way))

	m, err := destinations.Open(w.pins.Map(destinations.Name))
	w.must(err)
	defer m.Close()
	key := destinations.KeyFrom(whole(contestedAddr))
	for kind, says := range map[destinations.Kind]string{destinations.Host: "this node", destinations.Node: "another node"} {
		w.must(m.Put(key, destinations.Value{Kind: kind}))
		w.refusedAsTaken(nil, says)
	}
	w.must(m.Delete(key))
	w.add(w.newPod(), nil, askContested)
}

func TestAddressOfADeadPodIsTaken(t *testing.T) {
	w := newFixture(t)
	w.must(w.openEndpoints().Put(contestedKey, endpoints.Value{Ifindex: 4242}))
	p := w.newPod()
	w.ok("CHECK", p, prevResult(t, w.add(p, nil, askContested)))
}

// Of two at once one gets it, and is whole.
func TestAddressIsGivenOnce(t *testing.T) {
	w := newFixture(t)
	w.conf["args"] = map[string]any{"cni": map[string]any{"ips": []string{contested}}}
	w.conf["addressQuarantine"] = "0s"
	before := w.everything()
	for range 10 {
		var confs [2][]byte
		var pods [2]*pod
		var done [2]func() (string, error)
		for i, name := range []string{"net1", "net2"} {
			conf := maps.Clone(w.conf)
			conf["name"] = name
			confs[i], _ = json.Marshal(conf)
			pods[i] = w.newPod()
		}
		for i := range pods {
			done[i] = w.start("ADD", pods[i], confs[i])
		}
		var got []int
		for i := range pods {
			if out, err := done[i](); err == nil {
				got = append(got, i)
				w.ok("CHECK", pods[i], merged(prevResult(t, parseResult(t, out)), map[string]any{"name": []string{"net1", "net2"}[i]}))
			}
		}
		if len(got) > 1 {
			t.Fatal("both got the address")
		}
		for i := range pods {
			w.ok("DEL", pods[i], map[string]any{"name": []string{"net1", "net2"}[i]})
		}
	}
	w.unchanged(slices.Clone(before))
}

func merged(a, b map[string]any) map[string]any {
	maps.Copy(a, b)
	return a
}
