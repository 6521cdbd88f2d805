package prog

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/ports"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// spread opens so many connections of a pod to one server, from ports that are not the range's, and returns how many were let
// through.
func (b *bed) spread(pod string, flows int) (opened int, last string) {
	b.Helper()
	defer func(before bool) { b.answers = before }(b.answers)
	b.answers = true
	for i := range flows {
		p := tcp(pod, uint16(1+i), world, 53, syn)
		r := b.fromPod(p)
		if last = r.what; last == "forwarded" {
			b.fromUplink(answer(r, p)).is("delivered")
			opened++
		}
	}
	return opened, last
}

// One pod that opens as many connections to one server as there are ports leaves a third of them to others; at nine tenths in use none
// of theirs is refused.
func TestPortShare(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(60000, 61999), withTables(16384, 64))
		if n, why := b.spread(podA, 2000); n < 1330 || n > 1400 || why != "drop PORT_LIMIT" {
			t.Errorf("the first pod opened %d flows, then %q", n, why)
		}
		for pod, flows := range map[string]int{podB: 240, podC: 150} {
			if n, why := b.spread(pod, flows); n != flows {
				t.Errorf("%d of another pod's %d flows were opened, then %q", n, flows, why)
			}
		}
		b.fromPod(udp(podA, 30000, world, 54)).is("forwarded") // to another server
	})
}

// That no port was found is remembered, so that not each packet makes the search, of a pod or from outside.
func TestSearchIsRemembered(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPorts(60000, 60003), withPaths(time.Second))
		s := b.serve(vip, 53, wire.UDP, world+":53").nodePort(30053, 0)
		for port := range uint16(4) {
			s.nodePort(60000+port, 0)
		}
		for range 3 {
			b.fromUplink(udp(world2, 5000, nodeIP, 30053)).is("drop SNAT_EXHAUSTED")
			b.turnedAway(udp(podA, 5000, world, 53), "drop SNAT_EXHAUSTED")
		}
		tried := func(d wire.Direction) uint64 {
			v, err := b.traffic.Sum(d, traffic.SnatRetried)
			must(t, err)
			return v.Packets
		}
		if out, in := tried(wire.FromPod), tried(wire.FromUplink); in < 1024 || in+out > 1024+5*2 {
			t.Errorf("%d ports were tried for the world, %d for a pod", in, out)
		}
	})
}

// With nine tenths of the ports in use, by whomever, no flow is refused that may have one.
func TestSearchOfFullRange(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(60000, 60999), withTables(4096, 64))
		for i := range uint16(900) {
			out := b.tuple(wire.UDP, podA, 1+i, world, 53)
			e := fakeEntry(b)
			e.ToPort, e.Ifindex = wire.PortFrom(60000+i), uint32(b.pods[podA].index)
			must(t, b.snat.Put(out, e))
			key := reverseKey(out, e)
			e.ToAddress, e.ToPort = b.addr(podA), wire.PortFrom(1+i)
			must(t, b.reverse.Put(key, e))
		}
		if n, why := b.spread(podB, 45); n != 45 {
			t.Errorf("%d of 45 flows were opened, then %q", n, why)
		}
	})
}

// Counts that are too high, as where two destinations share a cell, refuse nobody.
func TestWrongPortCounts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(60000, 60999))
		for cell := range uint32(1 << ports.Bits) {
			must(t, b.ports.Put(ports.Key{Cell: cell}, ports.Value{Flows: 5000}))
		}
		if n, why := b.spread(podA, 100); n != 100 {
			t.Errorf("%d of 100 flows were opened, then %q", n, why)
		}
	})
}

// The counts go with the flows, whoever ends them.
func TestPortCountsEnd(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.spread(podA, 20)
		b.fromPod(tcp(podB, 50000, world, 80, syn)).is("forwarded")
		b.toUplink(tcp(nodeIP, 50000, world, 80, syn)).is("stack") // the node's own gives way
		if n := b.portsCounted(); n != 20*2+2+1 {
			t.Errorf("%d counted, want each pod's flow twice and the node's once", n)
		}
		b.deletePod(podB)
		b.sweep(usage.Snat, time.Hour, false)
		b.empty()
		if n := b.portsCounted(); n != 0 {
			t.Errorf("%d ports are counted that nobody holds", n)
		}
	})
}

func (b *bed) portsCounted() (n uint32) {
	b.Helper()
	for _, v := range all(b, b.ports) {
		n += v.Flows
	}
	return n
}

// With the agent dead new flows find what ended ones held: ports towards one server, places in the tables. The long form is
// five minutes' worth of 2 000 connections a second to four servers, ten seconds at a time, with the tables and the range that
// are the defaults.
func TestNobodySweeps(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		if priv.Long() {
			newBed(t, f, withTables(262144, 262144)).nobodySweeps(5000)
			return
		}
		newBed(t, f, withPorts(60000, 60255), withTables(512, 512)).nobodySweeps(40)
	})
}

// nobodySweeps opens that many connections to each of four servers and as many of the world's to a pod, and closes them, until
// 120 times as many have passed as there are at once. None is refused.
func (b *bed) nobodySweeps(each int) {
	b.Helper()
	must(b, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{}))
	must(b, b.usage.Put(usage.Key{Table: usage.Conntrack}, usage.Value{}))
	sport := uint16(1)
	for range 30 {
		for range each {
			for server := range uint16(4) {
				out := b.fromPod(tcp(podA, sport, world, 80+server, syn)).is("forwarded")
				b.fromUplink(answer(out, tcp(podA, sport, world, 80+server, rst|ack)).with(func(p *packet) { p.ack = 1 })).is("delivered")
			}
			b.fromUplink(udp(world, sport, podA, 53)).is("delivered")
			sport = sport%48000 + 1
		}
		b.age(2 * time.Minute)
	}
}
