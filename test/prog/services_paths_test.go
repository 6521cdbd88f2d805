package prog

import (
	"fmt"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// translating has the programs translate.
var translating = []option{withServices}

// servicePaths are those of a packet to a Service, and of one that is none while there are some.
var servicePaths = []path{
	{name: "from_pod/same_node_services", d: wire.FromPod, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, podB, 80), b.pods[podA]
	}},
	{name: "from_pod/same_node_clients", d: wire.FromPod, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		b.becomeClients()
		return udp(podA, 40000, podB, 80), b.pods[podA]
	}},
	{name: "from_pod/other_node_services", d: wire.FromPod, want: "forwarded", options: translating, prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, remote, 80), b.pods[podA]
	}},
	{name: "from_pod/other_node_clients", d: wire.FromPod, want: "forwarded", options: translating, prepare: func(b *bed) (packet, veth) {
		b.becomeClients()
		return udp(podA, 40000, remote, 80), b.pods[podA]
	}},
	{name: "from_uplink/other_node_services", d: wire.FromUplink, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		return udp(remote, 40000, podA, 80), b.uplink
	}},
	{name: "from_uplink/other_node_clients", d: wire.FromUplink, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		b.becomeClients()
		return udp(remote, 40000, podA, 80), b.uplink
	}},
	{name: "from_pod/service_same_node", d: wire.FromPod, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serve(vip, 80, wire.UDP, podB+":8080")
		return udp(podA, 40000, vip, 80), b.pods[podA]
	}},
	{name: "from_pod/service_other_node", d: wire.FromPod, want: "forwarded", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serve(vip, 80, wire.UDP, remote+":8080")
		return udp(podA, 40000, vip, 80), b.pods[podA]
	}},
	{name: "from_pod/service_same_node_10000", d: wire.FromPod, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serveMany()
		b.serve(vip, 80, wire.UDP, podB+":8080")
		return udp(podA, 40000, vip, 80), b.pods[podA]
	}},
	{name: "from_pod/service_other_node_10000", d: wire.FromPod, want: "forwarded", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serveMany()
		b.serve(vip, 80, wire.UDP, remote+":8080")
		return udp(podA, 40000, vip, 80), b.pods[podA]
	}},
	{name: "from_pod/service_new", d: wire.FromPod, want: "forwarded", fresh: true, options: translating, prepare: func(b *bed) (packet, veth) {
		b.serveFresh(vip, remote)
		return tcp(podA, 40000, vip, 1000, syn), b.pods[podA]
	}},
	{name: "from_pod/service_new_10000", d: wire.FromPod, want: "forwarded", fresh: true, options: translating, prepare: func(b *bed) (packet, veth) {
		b.serveMany()
		b.serveFresh(vip, remote)
		return tcp(podA, 40000, vip, 1000, syn), b.pods[podA]
	}},
	{name: "from_uplink/service_reply", d: wire.FromUplink, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serve(vip, 80, wire.UDP, remote+":8080")
		b.fromPod(udp(podA, 40000, vip, 80))
		return udp(remote, 8080, podA, 40000), b.uplink
	}},
	{name: "from_uplink/to_host_services", d: wire.FromUplink, want: "stack", options: translating, prepare: func(b *bed) (packet, veth) {
		return tcp(world, 4000, nodeIP, 22, ack), b.uplink
	}},
	{name: "from_uplink/node_port_near", d: wire.FromUplink, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
		return udp(world, 5000, nodeIP, 30080), b.uplink
	}},
	{name: "from_uplink/node_port_far", d: wire.FromUplink, want: "forwarded", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30080, 0)
		return udp(world, 5000, nodeIP, 30080), b.uplink
	}},
	{name: "from_uplink/node_port_far_reply", d: wire.FromUplink, want: "forwarded", options: translating, prepare: func(b *bed) (packet, veth) {
		b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30080, 0)
		v := b.fromUplink(udp(world, 5000, nodeIP, 30080)).view()
		return udp(remote, 8080, v.src, v.sport), b.uplink
	}},
	{name: "from_uplink/node_port_new", d: wire.FromUplink, want: "forwarded", fresh: true, options: translating, prepare: func(b *bed) (packet, veth) {
		b.serveFresh(external, remote)
		return tcp(world, 40000, external, 1000, syn), b.uplink
	}},
	{name: "from_pod/node_port_reply", d: wire.FromPod, want: "forwarded", options: translating, prepare: func(b *bed) (packet, veth) {
		b.becomeBackend()
		return udp(podB, 8080, world, 5000), b.pods[podB]
	}},
	{name: "from_pod/same_node_backend", d: wire.FromPod, want: "delivered", options: translating, prepare: func(b *bed) (packet, veth) {
		b.becomeBackend()
		return udp(podB, 40000, podA, 80), b.pods[podB]
	}},
	{name: "from_pod/to_host_services", d: wire.FromPod, want: "stack", options: translating, prepare: func(b *bed) (packet, veth) {
		return tcp(podA, 40000, nodeIP, 80, ack), b.pods[podA]
	}},
	{name: "to_uplink/host_services", d: wire.ToUplink, want: "stack", options: translating, prepare: func(b *bed) (packet, veth) {
		return tcp(nodeIP, 40000, world, 80, ack), b.uplink
	}},
}

// serveMany writes the frontends of 10 000 other Services. They share a set: what a packet has to be told from is their addresses.
func (b *bed) serveMany() {
	b.Helper()
	s := b.serve(vip3, 80, wire.UDP, remote+":8080")
	for i := range 9999 {
		address := fmt.Sprintf("10.97.%d.%d", i>>8, i&0xff)
		must(b, b.services.Put(services.Key{Address: b.addr(address)}, services.Value{Flags: services.ClusterIP | services.Answers}))
		s.also(address, 80, 0)
	}
}

// becomeBackend has a pod be asked by the world.
func (b *bed) becomeBackend() {
	b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
	b.fromUplink(udp(world, 5000, nodeIP, 30080))
}

// becomeClients has two pods open a flow to a Service each.
func (b *bed) becomeClients() {
	b.serve(vip, 80, wire.UDP, remote+":8080")
	for _, pod := range []string{podA, podB} {
		b.fromPod(udp(pod, 30000, vip, 80))
	}
}

// serveFresh serves every port that a repeater's fresh packets go to, each by a backend of its own.
func (b *bed) serveFresh(address, end string) {
	for port := range uint16(256) {
		b.serve(address, 1000+port, wire.TCP, fmt.Sprintf("%s:%d", end, 1000+port))
	}
}
