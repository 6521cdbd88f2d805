package prog

import (
	"fmt"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// client is one of many clients outside. In IPv6 each has a prefix of its own.
func (b *bed) client(n int) string {
	if b.family == inIPv6 {
		return fmt.Sprintf("2001:db8:77:%x::7", n)
	}
	return fmt.Sprintf("203.0.113.%d", n)
}

// askFrom has a client ask a NodePort from so many ports, and returns how often it was let through.
func (b *bed) askFrom(client string, flows int, port uint16) (opened int, last string) {
	b.Helper()
	for i := range uint16(flows) {
		last = b.fromUplink(udp(client, 5000+i, nodeIP, port)).what
		if last == "delivered" || last == "forwarded" {
			opened++
		}
	}
	return opened, last
}

// One client outside has two thirds of the world's share: neither pods nor the node have less for it, nor others outside. While
// that share is nearly used up, what nobody has answered ends earlier.
func TestOutsideFillsNoTable(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withTables(256, 256))
		b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.toUplink(udp(nodeIP, 30080, world, 53)).is("stack")
		if n, why := b.askFrom(world, 200, 30080); n != 149 || why != "drop SNAT_LIMIT" {
			t.Errorf("%d flows were opened, then %q", n, why)
		}
		if n, why := b.askFrom(b.client(1), 10, 30080); n != 10 {
			t.Errorf("%d of another client's 10 flows were opened, then %q", n, why)
		}
		b.fromPod(udp(podA, 50001, world, 53)).is("forwarded")
		b.count(159+3, 0)
		b.age(10 * time.Second)
		if n, _ := b.askFrom(b.client(2), 40, 30080); n != 40 {
			t.Errorf("%d of 40 flows were opened", n)
		}
		if n := b.sweep(usage.Snat, 0, false); n < 10 {
			t.Errorf("%d flows ended with a sweep", n)
		}
		b.pair(b.tuple(wire.UDP, podA, 50000, world, 53))
		b.pair(b.tuple(wire.UDP, nodeIP, 30080, world, 53))
	})
}

// fill has a hundred clients, from this one on, ask a NodePort, and returns how many flows they have opened.
func (b *bed) fill(first int, port uint16) (opened int, why string) {
	b.Helper()
	for n := range 100 {
		var some int
		some, why = b.askFrom(b.client(first+n), 3, port)
		opened += some
	}
	return opened, why
}

// A flood from outside does not shorten the lives of others' flows, whoever looks for room; nor does it keep the node from
// noting its own.
func TestOutsidePressesNobodyElse(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withTables(256, 256))
		b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
		for port := range uint16(30) {
			b.fromPod(udp(podA, 50000+port, world, 53)).is("forwarded")
		}
		if n, _ := b.fill(0, 30080); n != 198 { // seven eighths of 226
			t.Errorf("%d flows were opened", n)
		}
		b.toUplink(udp(nodeIP, 30080, world, 53)).is("stack")
		b.age(20 * time.Second) // longer than datagrams of the world's live under pressure, or pods' would
		if n, _ := b.fill(100, 30080); n != 197 {
			t.Errorf("%d flows were opened in place of those that have ended", n)
		}
		b.sweep(usage.Snat, 0, false)
		for port := range uint16(30) {
			b.pair(b.tuple(wire.UDP, podA, 50000+port, world, 53))
		}
		b.pair(b.tuple(wire.UDP, nodeIP, 30080, world, 53))
	})
}

// Many clients outside have nearly all of the table together; an eighth is left to pods.
func TestOutsideSharesTheTable(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withTables(256, 256))
		b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
		opened, why := b.fill(0, 30080)
		if opened != 224 || why != "drop SNAT_LIMIT" {
			t.Errorf("%d flows were opened, then %q", opened, why)
		}
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.sweep(usage.Snat, time.Hour, false)
		b.empty()
		if n := b.portsCounted(); n != 0 {
			t.Errorf("%d are counted that nobody holds", n)
		}
	})
}

// An IPv6 client has as little with all addresses of its network as with one.
func TestOutsideSharesOfANetwork(t *testing.T) {
	b := newBed(t, inIPv6, withServices, withTables(256, 256))
	b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
	opened := 0
	for n := range 200 {
		some, _ := b.askFrom(fmt.Sprintf("2001:db8:77:1::%x", 1+n), 1, 30080)
		opened += some
	}
	if opened != 150 {
		t.Errorf("%d flows were opened", opened)
	}
}

// A client's refusal is remembered as long as a path, and is nobody else's.
func TestRefusalOutsideIsRemembered(t *testing.T) {
	b := newBed(t, inIPv4, withServices, withTables(64, 64), withPaths(time.Second))
	b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
	b.askFrom(world, 39, 30080)
	b.age(2 * time.Minute)
	b.fromUplink(udp(world, 6000, nodeIP, 30080)).is("drop SNAT_LIMIT")
	b.fromUplink(udp(b.client(1), 6000, nodeIP, 30080)).is("delivered")
	b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
	time.Sleep(time.Second + 50*time.Millisecond) // the programs' clock goes by ticks
	b.fromUplink(udp(world, 6000, nodeIP, 30080)).is("delivered")
}

// connectFrom is askFrom of connections.
func (b *bed) connectFrom(client string, flows int, port uint16) (opened int, last string) {
	b.Helper()
	for i := range uint16(flows) {
		p := tcp(client, 5000+i, nodeIP, port, syn)
		r := b.fromUplink(p)
		if last = r.what; last == "forwarded" {
			b.back(r, p).is("forwarded")
			b.fromUplink(p.with(func(p *packet) { p.flags, p.seq, p.ack = ack, 1001, 5001 })).is("forwarded")
			opened++
		}
	}
	return opened, last
}

// The same of the ports towards a backend elsewhere.
func TestOutsidePortShares(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPorts(60000, 60999), withTables(16384, 64))
		b.serve(vip, 53, wire.TCP, world2+":53").nodePort(30053, 0)
		if n, why := b.connectFrom(world, 1000, 30053); n < 580 || n > 640 || why != "drop PORT_LIMIT" {
			t.Errorf("one client opened %d flows, then %q", n, why)
		}
		opened, why := 0, ""
		for n := range 100 {
			var some int
			some, why = b.connectFrom(b.client(n), 4, 30053)
			if n < 20 && some != 4 {
				t.Errorf("%d of client %d's 4 flows were opened, then %q", some, n, why)
			}
			opened += some
		}
		if opened < 220 || opened > 320 || why != "drop PORT_LIMIT" {
			t.Errorf("others opened %d flows, then %q", opened, why)
		}
		for i := range uint16(20) {
			b.fromPod(tcp(podB, 1+i, world2, 53, syn)).is("forwarded")
		}
		b.toUplink(udp(nodeIP, 30053, world2, 53)).is("stack") // the node's own is in nobody's share
		b.sweep(usage.Snat, 2*day, false)
		if n := b.portsCounted(); n != 0 {
			t.Errorf("%d ports are counted that nobody holds", n)
		}
	})
}

// Connections that a backend has closed and their client has not keep nobody else from it, and their client not for long.
func TestOutsideHalfClosed(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPorts(60000, 60099), withTables(4096, 64))
		b.serve(vip, 80, wire.TCP, remote+":8080").nodePort(30080, 0)
		opened := 0
		for ; opened < 100; opened++ {
			p := tcp(world, uint16(5000+opened), nodeIP, 30080, syn)
			r := b.fromUplink(p)
			if r.what != "forwarded" {
				break
			}
			v := r.view()
			b.back(r, p).is("forwarded")
			b.fromUplink(p.with(func(p *packet) { p.flags, p.seq, p.ack = ack, 1001, 5001 })).is("forwarded")
			b.fromUplink(tcp(v.dst, v.dport, v.src, v.sport, fin|ack).with(func(p *packet) { p.seq, p.ack = 5001, 1001 })).is("forwarded")
		}
		if opened < 58 || opened > 75 {
			t.Errorf("one client has %d connections", opened)
		}
		b.fromUplink(tcp(b.client(1), 5000, nodeIP, 30080, syn)).is("forwarded")
		b.age(40 * time.Second)
		b.fromUplink(tcp(world, 6000, nodeIP, 30080, syn)).is("forwarded")
	})
}
