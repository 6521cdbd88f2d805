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

var otherNetwork = map[string]any{"name": "net2"} // with the same range

// contest is a node of one family with an address that more than one want.
type contest struct {
	*fixture
	addr netip.Addr
	key  endpoints.Key
	ask  string
}

func forEachContest(t *testing.T, test func(t *testing.T, c contest)) {
	for f, addr := range [wire.Families]netip.Addr{netip.MustParseAddr("10.9.0.9"), netip.MustParseAddr("fd00:9::9")} {
		t.Run(wire.Family(f).String(), func(t *testing.T) {
			test(t, contest{
				fixture: newFixture(t, wire.Family(f)), addr: addr, key: endpoints.Key{Address: wire.AddrFrom(addr)},
				ask: "CNI_ARGS=IP=" + addr.String() + ";K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web",
			})
		})
	}
}

// refusedAsTaken is an ADD that must be refused, leave no trace and name the holder.
func (c contest) refusedAsTaken(conf map[string]any, words ...string) {
	c.t.Helper()
	before := c.everything()
	_, e := c.call("ADD", c.newPod(), conf, c.ask)
	c.isError(e, codeNoAddress, append(words, c.addr.String())...)
	c.unchanged(before)
}

func (w *fixture) openEndpoints() *endpoints.Map {
	w.t.Helper()
	m, err := endpoints.Open(w.pins.Map(endpoints.Name))
	w.must(err)
	w.t.Cleanup(func() { m.Close() })
	return m
}

func TestAddressOfALivingPodIsRefused(t *testing.T) {
	forEachContest(t, func(t *testing.T, c contest) {
		holder := c.newPod()
		r := c.add(holder, nil, c.ask)
		who := []string{"shop/web", holder.id.ContainerID, holder.id.IfName, holder.id.HostLinkName()}
		c.refusedAsTaken(otherNetwork, who...)
		c.ok("CHECK", holder, prevResult(t, r))

		// What the agent has not repaired yet must not be taken either.
		m := c.openEndpoints()
		v, err := m.Get(c.key)
		c.must(err)
		c.must(m.Delete(c.key))
		c.refusedAsTaken(otherNetwork, who...)
		c.must(m.Put(c.key, v))
		c.ok("CHECK", holder, prevResult(t, r))

		c.ok("DEL", holder, nil)
		c.add(c.newPod(), otherNetwork, c.ask)
	})
}

func TestAddressOfALivingPodIsRefusedToADelegatedIPAM(t *testing.T) {
	forEachContest(t, func(t *testing.T, c contest) {
		d := delegatingOn(c.fixture)
		holder := d.newPod()
		local := hostLocal(map[string]any{"ranges": rangesOf(c.families...)})
		r := d.add(holder, local, c.ask)
		d.answer(c.addr.String() + "/24")
		c.refusedAsTaken(otherNetwork, "shop/web", holder.id.ContainerID)
		d.asked("ADD", "DEL")
		maps.Copy(local, prevResult(t, r))
		d.ok("CHECK", holder, local)
	})
}

// Nobody can be named then, but the way to it.
func TestAddressThatLeadsElsewhereIsRefused(t *testing.T) {
	forEachContest(t, func(t *testing.T, c contest) {
		c.must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "elsewhere"}, PeerName: "there"}))
		l, err := c.host.LinkByName("elsewhere")
		c.must(err)
		c.must(c.host.SetUp(l.Index))
		way := device.Route{Dst: whole(c.addr), Index: l.Index}
		c.must(c.host.ReplaceRoute(way))
		c.refusedAsTaken(nil, "route", "elsewhere")
		c.must(c.host.DeleteRoute(way))

		m, err := destinations.Open(c.pins.Map(destinations.Name))
		c.must(err)
		defer m.Close()
		key := destinations.KeyFrom(whole(c.addr))
		for kind, says := range map[destinations.Kind]string{destinations.Host: "this node", destinations.Node: "another node"} {
			c.must(m.Put(key, destinations.Value{Kind: kind}))
			c.refusedAsTaken(nil, says)
		}
		c.must(m.Delete(key))
		c.add(c.newPod(), nil, c.ask)
	})
}

func TestAddressOfADeadPodIsTaken(t *testing.T) {
	forEachContest(t, func(t *testing.T, c contest) {
		c.must(c.openEndpoints().Put(c.key, endpoints.Value{Ifindex: 4242}))
		p := c.newPod()
		c.ok("CHECK", p, prevResult(t, c.add(p, nil, c.ask)))
	})
}

// Of two at once one gets it, and is whole.
func TestAddressIsGivenOnce(t *testing.T) {
	forEachContest(t, func(t *testing.T, c contest) {
		c.conf["args"] = map[string]any{"cni": map[string]any{"ips": []string{c.addr.String()}}}
		c.conf["addressQuarantine"] = "0s"
		before := c.everything()
		for range 5 {
			var confs [2][]byte
			var pods [2]*pod
			var done [2]func() (string, error)
			for i, name := range []string{"net1", "net2"} {
				conf := maps.Clone(c.conf)
				conf["name"] = name
				confs[i], _ = json.Marshal(conf)
				pods[i] = c.newPod()
			}
			for i := range pods {
				done[i] = c.start("ADD", pods[i], confs[i])
			}
			var got []int
			for i := range pods {
				if out, err := done[i](); err == nil {
					got = append(got, i)
					c.ok("CHECK", pods[i], merged(prevResult(t, parseResult(t, out)), map[string]any{"name": []string{"net1", "net2"}[i]}))
				}
			}
			if len(got) > 1 {
				t.Fatal("both got the address")
			}
			for i := range pods {
				c.ok("DEL", pods[i], map[string]any{"name": []string{"net1", "net2"}[i]})
			}
		}
		c.unchanged(slices.Clone(before))
	})
}

func merged(a, b map[string]any) map[string]any {
	maps.Copy(a, b)
	return a
}
