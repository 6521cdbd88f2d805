package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// setting is what packets there are, and how they get from node to node.
type setting struct {
	family string // ipv4, ipv6 or dual
	mode   string // --routing-mode of the agents, or docker
	links  string // 1; 2: nodes of even number are on another link than the rest, behind a router
}

// check says what is wrong with a setting.
func (s setting) check() error {
	switch {
	case lab.FamiliesByName[s.family] == nil:
		return fmt.Errorf("FAMILY=%s: takes ipv4, ipv6 or dual", s.family)
	case s.mode == docker && (s.family != "ipv4" || s.links != "1"):
		return fmt.Errorf("MODE=docker: takes FAMILY=ipv4 and LINKS=1")
	case s.mode == docker:
	case s.mode != "auto" && s.mode != "direct" && s.mode != "vxlan":
		return fmt.Errorf("MODE=%s: takes auto, direct, vxlan or docker", s.mode)
	case s.links != "1" && s.links != "2":
		return fmt.Errorf("LINKS=%s: takes 1 or 2", s.links)
	case s.mode == "direct" && s.links == "2":
		return fmt.Errorf("MODE=direct LINKS=2: nodes that share no link reach each other's pods with auto or vxlan only")
	}
	return nil
}

// limit is what the demo may take; everything in it waits for at most that.
func (s setting) limit() time.Duration {
	if s.mode == docker {
		return dockerLimit
	}
	return timeLimit
}

func (s setting) options() lab.Options {
	if s.mode == docker {
		return lab.Options{Nodes: 3, Families: lab.FamiliesByName[s.family], AgentFlags: []string{"--attach-bridge=" + bridge}}
	}
	options := lab.Options{Nodes: 3, Families: lab.FamiliesByName[s.family], AgentFlags: []string{"--routing-mode=" + s.mode}}
	if s.links == "2" {
		options.Links = 2
	}
	return options
}

func (s setting) String() string {
	if s.mode == docker {
		return "Docker, subnets from etcd"
	}
	text := "routing mode " + s.mode
	if s.links == "2" {
		text += ", nodes on two links"
	}
	var names []string
	for _, family := range lab.FamiliesByName[s.family] {
		names = append(names, family.Name())
	}
	return strings.Join(names, " and ") + ", " + text
}

// over names a family in a title, where there is more than one.
func (s setting) over(family wire.Family) string {
	if len(lab.FamiliesByName[s.family]) == 1 {
		return ""
	}
	return " over " + family.Name()
}

// way is how packets have to get from one node to another.
func (s setting) way(from, to *lab.Node) destinations.Way {
	if s.mode == "vxlan" || s.links == "2" && from.Number%2 != to.Number%2 {
		return destinations.Tunnel
	}
	return destinations.Direct
}

// between shows which way packets have gone from node to node: by what the agents say, and by what the programs on the tunnel have counted.
func (d *demo) between(ctx context.Context) error {
	d.heading("Between the nodes")
	for _, node := range d.lab.Nodes {
		var ways []string
		tunnels, right := 0, true
		has, err := waysFrom(ctx, node)
		for _, peer := range d.lab.Nodes {
			if peer == node {
				continue
			}
			want := d.setting.way(node, peer)
			if want == destinations.Tunnel {
				tunnels++
			}
			for _, family := range lab.FamiliesByName[d.setting.family] {
				right = right && has[family][peer.Name] == want
				ways = append(ways, fmt.Sprintf("%s%s: %s", peer.Name, d.setting.over(family), has[family][peer.Name]))
			}
		}
		in, out, countErr := throughTunnel(ctx, node)
		if err := errors.Join(err, countErr); err != nil {
			d.check(false, "%s: %v", node.Name, err)
			continue
		}
		d.check(right && in > 0 == (tunnels > 0) && out > 0 == (tunnels > 0), "%s to %s   tunnel: %d packets out, %d in",
			node.Name, pad(strings.Join(ways, ", "), 33), out, in)
	}
	return nil
}

// waysFrom are the ways to other nodes that a node's programs have, by family and name.
func waysFrom(ctx context.Context, node *lab.Node) (ways [wire.Families]map[string]destinations.Way, err error) {
	var status struct {
		Peers []struct {
			Name    string
			PodCIDR netip.Prefix `json:"pod_cidr"`
			Way     destinations.Way
		}
	}
	if err := ask(ctx, node, &status, "status", "-o", "json"); err != nil {
		return ways, err
	}
	for family := range ways {
		ways[family] = map[string]destinations.Way{}
	}
	for _, peer := range status.Peers {
		ways[wire.FamilyOf(peer.PodCIDR.Addr())][peer.Name] = peer.Way
	}
	return ways, nil
}

// throughTunnel counts the packets that have come to a node through the tunnel, and that have left it so.
func throughTunnel(ctx context.Context, node *lab.Node) (in, out uint64, err error) {
	var records []struct {
		Direction string
		Packets   uint64
	}
	err = ask(ctx, node, &records, "dump", "traffic", "-o", "json")
	for _, r := range records {
		switch r.Direction {
		case wire.FromTunnel.String():
			in += r.Packets
		case wire.ToTunnel.String():
			out += r.Packets
		}
	}
	return in, out, err
}

func ask(ctx context.Context, node *lab.Node, answer any, args ...string) error {
	out, err := node.Ebpfctl(ctx, args...)
	if err != nil {
		return err
	}
	return json.Unmarshal(out, answer)
}
