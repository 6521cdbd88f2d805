package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// hint is a command line for a shell as root, at the top of the checkout.
type hint struct{ what, command string }

// explain says how to look around in a cluster that was kept.
func (d *demo) explain() {
	d.heading("The cluster is running. Look around")
	hints, err := d.hints()
	if err != nil {
		d.check(false, "%v", err)
		return
	}
	for _, h := range hints {
		d.line("    %s %s", d.paint(dim, pad(h.what, 38)), h.command)
	}
}

func (d *demo) hints() ([]hint, error) {
	node := d.lab.Nodes[0]
	ebpfctl, err := d.lab.Binary("ebpfctl")
	if err != nil {
		return nil, err
	}
	on := func(netns string) string { return "ip netns exec " + netns + " " }
	// On the node, or the interfaces that it names would be the machine's.
	ctl := fmt.Sprintf("%s%s --bpffs %s --state-dir %s ", on(node.Netns()), quoted(ebpfctl), node.BPFFS(), node.StateDir())
	hints := []hint{{"everything that is there", "ip netns list | grep ec" + d.lab.ID}}
	for _, family := range lab.FamiliesByName[d.setting.family] {
		over := d.setting.over(family)
		hints = append(hints,
			hint{"on a node" + over, on(node.Netns()) + ipCommands[family] + " route"},
			hint{"from pod to pod" + over, fmt.Sprintf("%sping -c 3 %s", on(d.pods[0].Netns()), d.pods[2].AddrOf(family))},
			hint{"from a pod to the outside" + over, fmt.Sprintf("%sping -c 3 %s", on(d.pods[0].Netns()), d.outside.AddrOf(family))},
		)
	}
	own, port := []hint{{"change the nodes that the agents see", "vi " + d.lab.NodesFile()}}, 4789
	if d.dockers != nil {
		port = 8472
		if own, err = d.dockerHints(); err != nil {
			return nil, err
		}
	}
	hints = append(hints, own...)
	return append(hints,
		hint{"what leaves the node meanwhile", fmt.Sprintf("%stcpdump -ni %s icmp or icmp6 or udp port %d", on(node.Netns()), lab.Uplink, port)},
		hint{"status", ctl + "status"},
		hint{"the maps", ctl + "dump all"},
		hint{"drops as they come", ctl + "dump drops --watch"},
		hint{"kill the agent of that node", fmt.Sprintf("kill -9 %d; tail %s", node.AgentPID(), node.AgentLog())},
		hint{"end it", "go -C tools/demo run . -clean " + d.lab.ID},
		hint{"end all that were kept from here", "make clean"},
	), nil
}

// ipCommands are how the ip command is asked about a family.
var ipCommands = [wire.Families]string{wire.IPv4: "ip -4", wire.IPv6: "ip -6"}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// quoted is a word as a shell takes it.
func quoted(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
