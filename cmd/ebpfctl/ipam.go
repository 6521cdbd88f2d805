package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// ipamName is the store of addresses, which is no map but dumped like one.
const ipamName = "ipam"

// shortID is how much of a container ID a table shows.
const shortID = 13

// readIPAM reads the addresses that pods have and had, of all networks.
func readIPAM(stateDir string, now time.Time) (typed.Table, error) {
	entries, err := ipam.List(stateDir)
	if errors.Is(err, fs.ErrPermission) {
		return typed.Table{}, fmt.Errorf("read addresses below %s: permission denied: run as root", stateDir)
	}
	if err != nil {
		return typed.Table{}, fmt.Errorf("read addresses: %w", err)
	}
	pods, _ := observe.ReadPods(stateDir) // what can't be read has no name
	return ipamTable(entries, pods, now), nil
}

func ipamTable(entries []ipam.Entry, pods observe.Pods, now time.Time) typed.Table {
	slices.SortFunc(entries, func(a, b ipam.Entry) int {
		return cmp.Or(cmp.Compare(a.Network, b.Network), a.Address.Compare(b.Address), cmp.Compare(a.State, b.State))
	})
	return typed.Table{
		Name: ipamName,
		Columns: []typed.Column{
			{Name: "NETWORK"}, {Name: "ADDRESS"}, {Name: "STATE"}, {Name: "CONTAINER"}, {Name: "IFNAME"}, {Name: "SINCE", Right: true}, {Name: "POD NAME"},
		},
		Len: len(entries),
		Cells: func(i int) []string {
			e := entries[i]
			return []string{
				e.Network, e.Address.String(), string(e.State), dash(short(e.ContainerID)), dash(e.IfName),
				typed.Age(uint64(now.UnixNano()), uint64(e.Since.UnixNano())),
				dash(pods.Of(e.ContainerID, e.IfName).String()),
			}
		},
		Object: func(i int) typed.Object {
			e := entries[i]
			return append(typed.Object{
				{Name: "network", Value: e.Network},
				{Name: "address", Value: e.Address.String()},
				{Name: "state", Value: string(e.State)},
				{Name: "container_id", Value: e.ContainerID},
				{Name: "ifname", Value: e.IfName},
				{Name: "since", Value: e.Since.UTC().Format(time.RFC3339Nano)},
			}, pods.Of(e.ContainerID, e.IfName).Object()...)
		},
	}
}

func short(id string) string {
	if len(id) > shortID {
		return id[:shortID]
	}
	return id
}

func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
