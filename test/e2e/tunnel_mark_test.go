package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const (
	tosOffset = 1 // in an IPv4 header
	ce        = 3 // congestion experienced (RFC 3168)
)

// What a packet says of its class is on the outer packet too, and what routers say there of congestion arrives in the inner one (RFC
// 2983, uniform model; RFC 6040).
func TestClassAndCongestionPassTheTunnel(t *testing.T) {
	l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{"--routing-mode=vxlan"}})
	near, far := l.Nodes[0], l.Nodes[1]
	pod, other := addPod(t, near, "a"), addPod(t, far, "b")
	assertReaches(t, pod.Namespace, serve(t, other.Namespace), pod.Addr())
	for _, tos := range []byte{0, 0xb8, 0xb8 | 1, 2, 0x20 | 2} {
		for _, from := range []*lab.Namespace{pod.Namespace, near.Namespace} {
			capture, err := far.Capture(lab.Uplink)
			if err != nil {
				t.Fatal(err)
			}
			text := fmt.Sprintf("class %#x of %s", tos, from.Netns())
			packet := datagram(t, from.Addr(), other.Addr(), text)
			packet[tosOffset] = tos
			if err := from.SendRaw(packet); err != nil {
				t.Fatal(err)
			}
			eventually(t, answerLimit, text+" is on the outer packet", func() bool {
				for _, o := range outers(t, l, capture.Packets()) {
					if o.text() == text {
						return o.ip.class == tos && o.inner.class == tos
					}
				}
				return false
			})
			capture.Close()
		}
	}
	capture, err := other.Capture(other.IfName)
	if err != nil {
		t.Fatal(err)
	}
	defer capture.Close()
	for _, tos := range []byte{0xb8 | 1, 2} {
		inside := inner(t, pod.Addr(), other.Addr())
		frame := []byte(inside[1].(gopacket.Payload))
		sumOfTOS(frame, tos)
		packet := forged(t, near.Addr(), far.Addr(), tunnelVNI, inside...)
		packet[tosOffset] = tos | ce
		if err := near.SendRaw(packet); err != nil {
			t.Fatal(err)
		}
		eventually(t, answerLimit, fmt.Sprintf("congestion arrives on class %#x", tos), func() bool {
			for _, p := range capture.Packets() {
				if ip, ok := p.NetworkLayer().(*layers.IPv4); ok && ip.TOS == tos|ce && ip.SrcIP.String() == pod.Addr().String() {
					return true
				}
			}
			return false
		})
	}
}

// sumOfTOS gives an IPv4 header of TOS 0 another one, and its checksum what goes with it (RFC 1624).
func sumOfTOS(header []byte, tos byte) {
	header[tosOffset] = tos
	sum := uint32(^(uint16(header[10])<<8 | uint16(header[11]))) + uint32(tos)
	sum = ^(sum>>16 + sum&0xffff)
	header[10], header[11] = byte(sum>>8), byte(sum)
}

// text is what the inner datagram carries.
func (o outer) text() string {
	const header = 8 // of UDP
	if len(o.inner.payload) < header {
		return ""
	}
	return string(o.inner.payload[header:])
}

// A pod's own VXLAN passes the nodes' tunnel, with segments that the kernel cuts only behind both.
func TestTunnelInTheTunnel(t *testing.T) {
	l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{"--routing-mode=vxlan"}})
	pods := []*lab.Pod{addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")}
	addresses := []netip.Addr{netip.MustParseAddr("192.168.9.1"), netip.MustParseAddr("192.168.9.2")}
	for i, pod := range pods {
		below, err := pod.Netlink().LinkByName(pod.IfName)
		if err != nil {
			t.Fatal(err)
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "inside"
		device := &netlink.Vxlan{
			LinkAttrs: attrs, VxlanId: 7, Port: tunnelPort, Group: pods[1-i].Addr().AsSlice(), VtepDevIndex: below.Attrs().Index, Learning: true,
		}
		address := &netlink.Addr{IPNet: &net.IPNet{IP: addresses[i].AsSlice(), Mask: net.CIDRMask(24, 32)}}
		if err := errors.Join(pod.Netlink().LinkAdd(device), pod.Netlink().AddrAdd(device, address), pod.Netlink().LinkSetUp(device)); err != nil {
			t.Fatal(err)
		}
	}
	server, err := pods[1].Serve(0)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(addresses[1], server.Port)
	moved, err := pods[0].Transfer(within(t, readyLimit), at, *payload)
	assertSeen(t, "a transfer through both tunnels", moved.Seen, err, addresses[0])
	if _, err := pods[0].UDP(t.Context(), at, 9000); err != nil {
		t.Error(err)
	}
}
