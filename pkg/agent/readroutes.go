package agent

import (
	"maps"
	"slices"
	"sync"

	"github.com/gaissmai/bart"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// earlier is what a look takes over from the ones before it.
type earlier struct {
	pods  *podView          // nil: pods are looked at anew
	asked func() *bart.Lite // what the next plan asks about
	many  *routeFilter      // of the newest view
}

// lookAtRoutes lists what decides on packets' ways.
func (v *view) lookAtRoutes(host *device.Handle, cfg Config, known earlier) (err error) {
	if v.rules, err = device.Rules(v.families()...); err != nil {
		return err
	}
	if err = v.readRoutes(host, cfg, known); err != nil {
		return err
	}
	v.policies, err = device.Policies(v.families()...)
	return err
}

// readRoutes reads the routes of all tables that packets meet, of families that are not looked at those of ours.
func (v *view) readRoutes(host *device.Handle, cfg Config, known earlier) error {
	asked, native := sync.OnceValue(known.asked), slices.Concat(cfg.NonMasquerade, cfg.Cluster)
	var several map[linkFamily]bool
	if known.many != nil {
		several = known.many.sources.several
	}
	f, err := filterRoutes(fewRoutes, asked, native, newRouteSources(v, cfg, several), func(take func(device.Route)) error { return v.eachRoute(host, take) })
	if err != nil {
		return err
	}
	for _, r := range f.kept {
		if r.Table == 0 {
			v.routes = append(v.routes, r)
		} else {
			v.others = append(v.others, r)
		}
	}
	if f.active {
		v.many = f
	}
	return nil
}

// eachRoute calls take for each route, those of the main table first, always in the same order: plans are compared.
func (v *view) eachRoute(host *device.Handle, take func(device.Route)) error {
	for _, family := range []int{device.IPv4, device.IPv6} {
		protocol := 0
		if !slices.Contains(v.families(), family) {
			protocol = device.Protocol
		}
		if err := host.EachRoute(family, 0, protocol, take); err != nil {
			return err
		}
	}
	for _, table := range slices.Sorted(maps.Keys(v.tables())) {
		for _, family := range v.families() {
			if err := host.EachRoute(family, table, 0, take); err != nil {
				return err
			}
		}
	}
	return nil
}

// tables are those that rules lead to, but for the usual ones.
func (v *view) tables() map[int]bool {
	tables := map[int]bool{}
	for _, r := range v.rules {
		if !slices.Contains([]int{unix.RT_TABLE_UNSPEC, unix.RT_TABLE_LOCAL, unix.RT_TABLE_MAIN, unix.RT_TABLE_DEFAULT}, r.Table) {
			tables[r.Table] = true
		}
	}
	return tables
}
