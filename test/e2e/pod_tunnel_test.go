package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Tunnels of the pods' own, whose checksums and segments stand far behind the header that the programs read.

// podTunnel is a VXLAN between two who are not in the cluster's own tunnel.
type podTunnel struct {
	outside wire.Family // of the outer packets
	id      int
	port    int  // of both ends
	sums    bool // whether outer packets have a checksum
}

// add makes one end, and returns its address inside. Without a far end its packets go nowhere yet.
func (p podTunnel) add(t *testing.T, on *lab.Namespace, last byte, far netip.Addr) netip.Addr {
	t.Helper()
	inner := netip.AddrFrom4([4]byte{192, 168, byte(p.id), last})
	execute(t, on, p.request(on.AddrOf(p.outside), far))
	handle := on.Netlink()
	link, err := handle.LinkByName(p.device())
	if err != nil {
		t.Fatal(err)
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: inner.AsSlice(), Mask: net.CIDRMask(24, 32)}}
	if err := errors.Join(handle.AddrAdd(link, address), handle.LinkSetUp(link)); err != nil {
		t.Fatal(err)
	}
	return inner
}

// request asks for the device. The netlink library can't ask for one without checksums over IPv4.
func (p podTunnel) request(local, far netip.Addr) *nl.NetlinkRequest {
	ends := [wire.Families][2]int{wire.IPv4: {nl.IFLA_VXLAN_LOCAL, nl.IFLA_VXLAN_GROUP}, wire.IPv6: {nl.IFLA_VXLAN_LOCAL6, nl.IFLA_VXLAN_GROUP6}}[p.outside]
	sums, none := byte(0), byte(1)
	if p.sums {
		sums, none = 1, 0
	}
	port := binary.BigEndian.AppendUint16(nil, uint16(p.port))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, []byte("vxlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_VXLAN_ID, nl.Uint32Attr(uint32(100+p.id)))
	data.AddRtAttr(ends[0], local.AsSlice())
	if far.IsValid() {
		data.AddRtAttr(ends[1], far.AsSlice())
	}
	data.AddRtAttr(nl.IFLA_VXLAN_PORT, port)
	data.AddRtAttr(nl.IFLA_VXLAN_PORT_RANGE, binary.BigEndian.AppendUint16(port, uint16(p.port)+1)) // one source port, so that there is one flow
	data.AddRtAttr(nl.IFLA_VXLAN_LEARNING, []byte{0})                                               // which would learn no port
	data.AddRtAttr(nl.IFLA_VXLAN_UDP_CSUM, []byte{sums})
	data.AddRtAttr(nl.IFLA_VXLAN_UDP_ZERO_CSUM6_TX, []byte{none})
	data.AddRtAttr(nl.IFLA_VXLAN_UDP_ZERO_CSUM6_RX, []byte{1})
	request := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(p.device())))
	request.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(1400)))
	request.AddData(info)
	return request
}

// execute sends a netlink request in a namespace.
func execute(t *testing.T, on *lab.Namespace, request *nl.NetlinkRequest) {
	t.Helper()
	err := on.Do(func() error {
		_, err := request.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (p podTunnel) device() string { return fmt.Sprintf("tunnel%d", p.id) }

// TestTunnelBetweenPods: TCP through a VXLAN that two pods have built.
func TestTunnelBetweenPods(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: families})
	a := addPod(t, l.Nodes[0], "a")
	peers := []*lab.Pod{addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")}
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		for i, peer := range peers {
			for j, sums := range []bool{true, false} {
				tunnel := podTunnel{family, 10*i + 2*int(family) + j, tunnelPort, sums}
				tunnel.add(t, a.Namespace, 1, peer.AddrOf(family))
				inner := tunnel.add(t, peer.Namespace, 2, a.AddrOf(family))
				server, err := peer.Serve(0)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := a.Transfer(within(t, 20*time.Second), netip.AddrPortFrom(inner, server.Port), 1<<20); err != nil {
					t.Errorf("to %s, outer checksums %v: %v", peer.Name, sums, err)
				}
			}
		}
	})
}

// TestTunnelToTheWorld: TCP through a VXLAN whose outer packets are masqueraded, on their way cut by whoever is left to do it.
func TestTunnelToTheWorld(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: families})
	pod := addPod(t, l.Nodes[0], "a")
	sumInSoftware(t, l) // so that what the node sends is whole on the wire
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		for i, sums := range []bool{true, false} {
			id := 2*int(family) + i
			tunnel := podTunnel{family, id, 8472 + id, sums}
			inner := joinTunnel(t, l, tunnel, pod)
			for _, off := range [][]string{nil, {"TSO", "GSO"}, {"tx checksum"}} {
				t.Run(fmt.Sprintf("checksums %v, off: %q", sums, off), func(t *testing.T) {
					if err := pod.SetOffloads(pod.IfName, true); err != nil {
						t.Fatal(err)
					}
					if off != nil {
						if err := pod.SetOffloads(pod.IfName, false, off...); err != nil {
							t.Fatal(err)
						}
					}
					assertThroughTheWorld(t, l, tunnel, pod, inner)
				})
			}
		}
	})
}

// joinTunnel makes both ends, and has the outside host learn where the pod's is reached, as a server of tunnels would.
func joinTunnel(t *testing.T, l *lab.Lab, tunnel podTunnel, pod *lab.Pod) (inner netip.Addr) {
	t.Helper()
	capture, err := l.Outside.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	inner = tunnel.add(t, l.Outside, 2, netip.Addr{})
	tunnel.add(t, pod.Namespace, 1, lab.OutsideAddr[tunnel.outside])
	send(t, dialUDP(t, pod.Namespace, 0, netip.AddrPortFrom(inner, 9)), "is anybody there?")
	node, port := pod.Node.AddrOf(tunnel.outside), layers.UDPPort(0)
	eventually(t, answerLimit, "the outside host hears of the pod's end", func() bool {
		for _, packet := range tunnel.sentBy(node, capture.Packets()) {
			port = packet.TransportLayer().(*layers.UDP).SrcPort
		}
		return port != 0
	})
	capture.Close()
	link, err := l.Outside.Netlink().LinkByName(tunnel.device())
	if err != nil {
		t.Fatal(err)
	}
	// Whatever is not known otherwise goes there.
	request := nl.NewNetlinkRequest(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_APPEND|unix.NLM_F_ACK)
	request.AddData(&netlink.Ndmsg{
		Family: unix.AF_BRIDGE, Index: uint32(link.Attrs().Index), State: netlink.NUD_NOARP | netlink.NUD_PERMANENT, Flags: netlink.NTF_SELF,
	})
	request.AddData(nl.NewRtAttr(netlink.NDA_LLADDR, make([]byte, 6)))
	request.AddData(nl.NewRtAttr(netlink.NDA_DST, node.AsSlice()))
	request.AddData(nl.NewRtAttr(netlink.NDA_PORT, binary.BigEndian.AppendUint16(nil, uint16(port))))
	execute(t, l.Outside, request)
	return inner
}

// assertThroughTheWorld has bytes go and come back through the tunnel, and looks at the outer packets.
func assertThroughTheWorld(t *testing.T, l *lab.Lab, tunnel podTunnel, pod *lab.Pod, inner netip.Addr) {
	t.Helper()
	server, err := l.Outside.Serve(0)
	if err != nil {
		t.Fatal(err)
	}
	capture, err := l.Outside.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := pod.DialTCP(within(t, answerLimit), netip.AddrPortFrom(inner, server.Port), 0)
	if err == nil {
		err = errors.Join(stream.Echo(within(t, 20*time.Second), 1<<20), stream.Close())
	}
	if err != nil {
		t.Error(err)
	}
	sent := tunnel.sentBy(pod.Node.AddrOf(tunnel.outside), capture.Close())
	if len(sent) < 1<<20/1400 {
		t.Errorf("%d packets of the tunnel were sent", len(sent))
	}
	for _, packet := range sent {
		sum := packet.TransportLayer().(*layers.UDP).Checksum
		if has := sum != 0; has != tunnel.sums || has && !udpSumRight(packet.Data(), tunnel.outside) {
			t.Errorf("the outer checksum is %#x:\n%s", sum, packet)
			return
		}
	}
}

// sentBy are the outer packets of one sender.
func (p podTunnel) sentBy(from netip.Addr, packets []gopacket.Packet) (sent []gopacket.Packet) {
	for _, packet := range packets {
		ip, _ := ipHeaderOf(packet.NetworkLayer())
		if udp, ok := packet.TransportLayer().(*layers.UDP); ok && ip.source == from && udp.DstPort == layers.UDPPort(p.port) {
			sent = append(sent, packet)
		}
	}
	return sent
}

// udpSumRight says whether a frame's UDP checksum is that of what follows.
func udpSumRight(frame []byte, family wire.Family) bool {
	f := frames[family]
	udp := frame[f.transport:]
	udp = udp[:binary.BigEndian.Uint16(udp[4:])]
	pseudo := append([]byte{0, unix.IPPROTO_UDP, udp[4], udp[5]}, frame[f.source:f.transport]...)
	return onesSum(append(pseudo, udp...)) == 0xffff
}
