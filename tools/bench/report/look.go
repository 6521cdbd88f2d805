package report

import "image/color"

// look is how a mode is shown.
type look struct {
	mode   string
	colour color.RGBA
	// about says what it is.
	about string
}

// looks are the modes': the same in every plot, ours warm, the limit grey, the others cold. They can be told apart without seeing
// red and green.
func looks() []look {
	return []look{
		{"direct", color.RGBA{0x99, 0x99, 0x99, 0xff}, "the machine's limit: a veth pair with nothing between (same node), node to node, node to the host outside; no pods"},
		{"ebpf", color.RGBA{0xd5, 0x5e, 0x00, 0xff}, "this project on nodes without kube-proxy: its agent with the default flags, its plugin, direct routing"},
		{"ebpf+kube-proxy", color.RGBA{0xe6, 0x9f, 0x00, 0xff}, "the same on nodes with kube-proxy, such as kubeadm's, and with portmap chained: between pods each packet is asked for in netfilter's table, what leaves walks the host's stack. " +
			"Traffic to Services, which walks it in any of these networks, is not measured; no gain is to be expected of it"},
		{"ebpf-vxlan", color.RGBA{0xcc, 0x79, 0xa7, 0xff}, "the same over VXLAN"},
		{"iptables", color.RGBA{0x00, 0x72, 0xb2, 0xff}, "flannel host-gw and kube-proxy: upstream's bridge, host-local and portmap plugins, bridge-nf-call-iptables, a route per node, their rules"},
		{"iptables-vxlan", color.RGBA{0x56, 0xb4, 0xe9, 0xff}, "the same over a VXLAN device with static entries, as flannel makes it"},
		{"ptp", color.RGBA{0x00, 0x9e, 0x73, 0xff}, "kindnet: upstream's ptp plugin, routes and masquerading; no bridge: the strongest classical rival"},
		{"nftables", color.RGBA{0x33, 0x33, 0x66, 0xff}, "as iptables, with nftables' rules"},
	}
}

func colour(mode string) color.RGBA {
	for _, l := range looks() {
		if l.mode == mode {
			return l.colour
		}
	}
	return color.RGBA{A: 0xff}
}
