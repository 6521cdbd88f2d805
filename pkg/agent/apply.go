package agent

import (
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// writeConfig writes this node's one record.
func (r *reconciler) writeConfig() error {
	have, err := r.dp.Maps.Config.Get(config.Key{})
	if err != nil {
		return err
	}
	if have == r.result.Config {
		return nil
	}
	known := have
	known.Flags = r.result.Config.Flags
	if own := r.result.Standing.Own4(); own.IsValid() && known != r.result.Config {
		r.log.Info("this node's podCIDR", "podCIDR", own.String(), "address", r.result.Standing.NodeIP4().String())
	}
	return r.dp.Maps.Config.Put(config.Key{}, r.result.Config)
}

// ofPod says that an entry is of one pod outside the podCIDR: those are written
// where endpoints are tended, under the endpoint's lock.
func ofPod(k destinations.Key, v destinations.Value) bool {
	return v.Kind == destinations.Local && k.PrefixLen == 128
}

func (r *reconciler) destinations() typed.Sync[destinations.Key, destinations.Value] {
	return typed.Sync[destinations.Key, destinations.Value]{Map: r.dp.Maps.Destinations, Have: r.applied, Same: destinations.Same}
}

// writeDestinations adds and changes entries, all that it can.
func (r *reconciler) writeDestinations() error {
	want := maps.Clone(r.result.Destinations)
	maps.DeleteFunc(want, ofPod)
	return r.destinations().Add(want)
}

// deleteDestinations removes what the plan does not have. A pod's entry is not
// known to be nobody's while some pods' state can't be read.
func (r *reconciler) deleteDestinations() error {
	return r.destinations().Remove(func(k destinations.Key, have destinations.Value) bool {
		_, wanted := r.result.Destinations[k]
		return wanted || r.view.incomplete != nil && ofPod(k, have)
	})
}

// ownRoutes is what the kernel holds of ours, but for the routes to pods. One over
// a link that the view lacks is of a pod that has come since the links were listed.
func (r *reconciler) ownRoutes() map[netip.Prefix]plan.Route {
	have := map[netip.Prefix]plan.Route{}
	for _, route := range r.view.routes {
		link, there := r.view.links[route.Index]
		if route.Protocol != device.Protocol || endpoint.IsHostLinkName(link.Name) || !there && route.Index != 0 {
			continue
		}
		have[route.Dst] = fromKernel(route)
	}
	return have
}

func fromKernel(k device.Route) plan.Route {
	route := plan.Route{Dst: k.Dst}
	if !k.Unreachable {
		route.Via, route.Src, route.Index = k.Gateway, k.Source, uint32(k.Index)
	}
	return route
}

func toKernel(p plan.Route) device.Route {
	return device.Route{Dst: p.Dst, Index: int(p.Index), Gateway: p.Via, Source: p.Src, Unreachable: !p.Via.IsValid()}
}

// writeRoutes adds and changes routes. One of somebody else to the very same
// prefix stays; the pods' packets don't need ours. One that the kernel refuses is
// the fault of the node that it leads to, whose problem it becomes, and of nobody
// else; without the one to this node's own podCIDR no pod can be carried.
func (r *reconciler) writeRoutes() (own error) {
	foreign, disputed := r.foreignRoutes(), map[netip.Prefix]error{}
	refused := map[netip.Prefix]error{}
	for _, want := range r.result.Routes {
		have, ok := r.routes[want.Dst]
		if ok && have == want {
			continue
		}
		if protocol, taken := foreign[want.Dst]; taken {
			disputed[want.Dst] = fmt.Errorf("the route is somebody else's (protocol %d) and stays; the host itself may not reach these pods", protocol)
			continue
		}
		err := r.host.ReplaceRoute(toKernel(want))
		switch {
		case err == nil:
			r.routes[want.Dst] = want
		case slices.Contains(r.result.Standing.Own, want.Dst):
			own = err
		default:
			refused[want.Dst] = err
		}
	}
	r.blame(refused)
	maps.Copy(disputed, refused) // of nodes that an earlier agent knew
	r.complainOfRoutes(disputed)
	return own
}

// foreignRoutes are the prefixes that a route of somebody else stands in the way
// of, with its protocol.
func (r *reconciler) foreignRoutes() map[netip.Prefix]int {
	foreign := map[netip.Prefix]int{}
	for _, route := range r.view.routes {
		if route.Protocol != device.Protocol && route.Priority == 0 {
			foreign[route.Dst] = route.Protocol
		}
	}
	return foreign
}

// complainOfRoutes logs what is new among the routes that can't be written, and
// forgets those that can, so that they are logged when it happens again.
func (r *reconciler) complainOfRoutes(now map[netip.Prefix]error) {
	about := func(p netip.Prefix) string { return "route " + p.String() }
	for p := range r.disputed {
		if now[p] == nil {
			r.settled(about(p))
		}
	}
	for p, err := range now {
		r.complain(about(p), err)
	}
	r.disputed = now
}

// blame takes the routes that the kernel refuses over into the problems of the
// nodes that they lead to.
func (r *reconciler) blame(refused map[netip.Prefix]error) {
	if len(refused) == 0 {
		return
	}
	for _, peer := range r.result.Peers {
		for _, p := range peer.PodCIDRs {
			if err := refused[p]; err != nil {
				text := fmt.Sprintf("%v, so this node itself can't reach the pods there by %s", err, peer.Address)
				r.result.Problems = append(r.result.Problems, plan.Problem{Node: peer.Name, Reason: plan.Refused, Text: text})
			}
			delete(refused, p)
		}
	}
}

// deleteRoutes removes the routes of ours that the plan does not have.
func (r *reconciler) deleteRoutes() error {
	wanted := make(map[netip.Prefix]bool, len(r.result.Routes))
	for _, route := range r.result.Routes {
		wanted[route.Dst] = true
	}
	for dst, route := range r.routes {
		if wanted[dst] {
			continue
		}
		if err := r.host.DeleteRoute(toKernel(route)); err != nil {
			return err
		}
		delete(r.routes, dst)
	}
	return nil
}

// stamp tells without reading whether a file is still the same. The time is that
// of the last change of any kind: nobody can set it.
type stamp struct {
	inode   uint64
	size    int64
	changed unix.Timespec
}

func (r *reconciler) listPath() string { return filepath.Join(r.cfg.Conf, install.Conflist) }

func stampOf(path string) stamp {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return stamp{}
	}
	return stamp{st.Ino, st.Size, st.Ctim}
}

// writeList tells the runtime that this node carries pods.
func (r *reconciler) writeList() error {
	l := install.List{
		BPFFS: string(r.cfg.BPFFS), StateDir: r.cfg.State, MTU: r.cfg.MTU, Attach: string(r.cfg.Attach),
		Quarantine: r.cfg.Quarantine, LogLevel: r.cfg.LogLevel,
		PodCIDRs: []netip.Prefix{r.result.Standing.Own4()},
	}
	if l.MTU == 0 {
		l.MTU = r.view.mtu()
	}
	var err error
	if l.Portmap, err = r.findPortmap(); err != nil {
		return err
	}
	wrote, err := install.WriteList(r.cfg.Conf, l)
	if wrote {
		r.log.Info("network configuration list written", "file", r.listPath(), "podCIDR", l.PodCIDRs[0].String(), "mtu", l.MTU, "portmap", l.Portmap != nil)
	}
	r.list = stampOf(r.listPath())
	return err
}

// findPortmap returns the plugin that is to be chained for host ports, if any.
func (r *reconciler) findPortmap() (*install.Chained, error) {
	if r.cfg.Portmap == PortmapOff || r.cfg.Bin == "" {
		return nil, nil
	}
	path := filepath.Join(r.cfg.Bin, install.Portmap)
	if now := stampOf(path); now == (stamp{}) || now != r.portmap.stamp {
		found, err := install.FindPortmap(r.cfg.Bin)
		if err != nil {
			return nil, err
		}
		r.portmap.stamp, r.portmap.found = now, found
	}
	if r.portmap.found == nil && r.cfg.Portmap == PortmapOn {
		return nil, fmt.Errorf("--portmap on: there is no %s; put it there, or leave host ports with --portmap off", path)
	}
	return r.portmap.found, nil
}
