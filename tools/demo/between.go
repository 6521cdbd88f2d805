package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// setting is how packets get from node to node.
type setting struct {
	mode  string // --routing-mode of the agents
	links string // 1; 2: nodes of even number are on another link than the rest, behind a router
}

// check says what is wrong with a setting.
func (s setting) check() error {
	switch {
	case s.mode != "auto" && s.mode != "direct" && s.mode != "vxlan":
		return fmt.Errorf("MODE=%s: takes auto, direct or vxlan", s.mode)
	case s.links != "1" && s.links != "2":
		return fmt.Errorf("LINKS=%s: takes 1 or 2", s.links)
	case s.mode == "direct" && s.links == "2":
		return fmt.Errorf("MODE=direct LINKS=2: nodes that share no link reach each other's pods with auto or vxlan only")
	}
	return nil
}

func (s setting) options() lab.Options {
	options := lab.Options{Nodes: 3, AgentFlags: []string{"--routing-mode=" + s.mode}}
	if s.links == "2" {
		options.Links = 2
	}
	return options
}

func (s setting) String() string {
	if s.links == "2" {
		return "routing mode " + s.mode + ", nodes on two links"
	}
	return "routing mode " + s.mode
}

// way is how packets have to get from one node to another.
func (s setting) way(from, to *lab.Node) destinations.Way {
	if s.mode == "vxlan" || lab.FabricPrefix[wire.IPv4].Contains(from.Addr()) != lab.FabricPrefix[wire.IPv4].Contains(to.Addr()) {
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
			right = right && has[peer.Name] == want
			ways = append(ways, fmt.Sprintf("%s: %s", peer.Name, has[peer.Name]))
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

// waysFrom are the ways to other nodes that a node's programs have, by name.
func waysFrom(ctx context.Context, node *lab.Node) (map[string]destinations.Way, error) {
	var status struct {
		Peers []struct {
			Name string
			Way  destinations.Way
		}
	}
	if err := ask(ctx, node, &status, "status", "-o", "json"); err != nil {
		return nil, err
	}
	ways := map[string]destinations.Way{}
	for _, peer := range status.Peers {
		ways[peer.Name] = peer.Way
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
