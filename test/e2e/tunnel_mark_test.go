package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const ce = 3 // congestion experienced (RFC 3168)

// What a packet says of its class is on the outer packet too, and what routers say there of congestion arrives in the inner one (RFC
// 2983, uniform model; RFC 6040).
func TestClassAndCongestionPassTheTunnel(t *testing.T) {
	t.Parallel()
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
			setClass(packet, tos)
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
		setClass(frame, tos)
		packet := forged(t, near.Addr(), far.Addr(), tunnelVNI, inside...)
		setClass(packet, tos|ce)
		if err := near.SendRaw(packet); err != nil {
			t.Fatal(err)
		}
		eventually(t, answerLimit, fmt.Sprintf("congestion arrives on class %#x", tos), func() bool {
			for _, p := range capture.Packets() {
				if ip, ok := ipHeaderOf(p.NetworkLayer()); ok && ip.class == tos|ce && ip.source == pod.Addr() {
					return true
				}
			}
			return false
		})
	}
}

// setClass gives an IP header of class 0 another one, and IPv4's checksum what goes with it (RFC 1624).
func setClass(header []byte, class byte) {
	if header[0]>>4 == 6 { // the class lies across two bytes
		header[0] |= class >> 4
		header[1] |= class << 4
		return
	}
	header[1] = class
	sum := uint32(^(uint16(header[10])<<8 | uint16(header[11]))) + uint32(class)
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
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{"--routing-mode=vxlan"}})
	pods := []*lab.Pod{addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")}
	network := [wire.Families]netip.Prefix{wire.IPv4: netip.MustParsePrefix("192.168.9.0/24"), wire.IPv6: netip.MustParsePrefix("fd00:192:168:9::/64")}[firstFamily(l)]
	addresses := []netip.Addr{inNetwork(network, 1), inNetwork(network, 2)}
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
		address := &netlink.Addr{IPNet: prefix(netip.PrefixFrom(addresses[i], network.Bits()).String()), Flags: unix.IFA_F_NODAD}
		if err := errors.Join(pod.Netlink().LinkAdd(device), pod.Netlink().AddrAdd(device, address), pod.Netlink().LinkSetUp(device)); err != nil {
			t.Fatal(err)
		}
	}
	at := netip.AddrPortFrom(addresses[1], serve(t, pods[1].Namespace).Port())
	moved, err := pods[0].Transfer(within(t, readyLimit), at, *payload)
	assertSeen(t, "a transfer through both tunnels", moved.Seen, err, addresses[0])
	if _, err := pods[0].UDP(t.Context(), at, 9000); err != nil {
		t.Error(err)
	}
}
