package agent

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// guardedByConfig are the ports of --listen and --metrics-listen.
func (c Config) guardedByConfig() (all guard.Ports) {
	for _, listen := range []struct{ address, owner string }{
		{c.Listen, "the agent of ebpf-cni (--listen)"}, {c.MetricsListen, "the metrics of ebpf-cni (--metrics-listen)"},
	} {
		_, text, err := net.SplitHostPort(listen.address)
		if err != nil {
			continue // nothing is served
		}
		if port, err := strconv.ParseUint(text, 10, 16); err == nil && port != 0 {
			all = append(all, guard.Port{Number: uint16(port), Owner: listen.owner})
		}
	}
	return all
}

// guarded is what the controller keeps of the ports that no pod gets.
type guarded struct {
	// at is where this node is, and held are its addresses.
	at   whereabouts
	held map[netip.Addr]bool
	// servers are where an API server has answered on an address that this node has, sorted. Its Service names it only while it is ready.
	servers []netip.AddrPort
	// listed says that the file has them, with the health checks of that generation.
	listed     bool
	generation int
}

// standingServers are the API servers that an earlier agent has listed: the only ports with an address.
func (n *node) standingServers() (all []netip.AddrPort) {
	listed, err := endpoint.ReadGuard(n.cfg.State)
	if err != nil {
		n.log.Warn("the list of guarded ports can't be read, it is made anew", "error", err)
	}
	for _, p := range listed {
		if p.Address.IsValid() {
			all = append(all, netip.AddrPortFrom(p.Address, p.Number))
		}
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return slices.Compact(all)
}

// keepServers takes in API servers on this node's addresses, and forgets those on addresses that it has no more. It reports whether that
// changes anything. One that restarts is not in its Service meanwhile, and is to find its port free.
func (c *serviceController) keepServers() (changed bool) {
	now := slices.DeleteFunc(slices.Clone(c.guarded.servers), func(at netip.AddrPort) bool { return !c.guarded.held[at.Addr()] })
	for at, proto := range c.model.APIServerPorts(c.addressesOfAPI()) {
		at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
		if proto == wire.TCP && c.guarded.held[at.Addr()] {
			now = append(now, at)
		}
	}
	slices.SortFunc(now, netip.AddrPort.Compare)
	now = slices.Compact(now)
	if slices.Equal(now, c.guarded.servers) {
		return false
	}
	c.guarded.servers, c.guarded.listed = now, false
	return true
}

// guardedHere are the ports of this node's own processes that no pod gets, beside guard.Fixed: of the agent, and of an API server on
// an address of this node.
func (c *serviceController) guardedHere() guard.Ports {
	all := c.cfg.guardedByConfig()
	for _, at := range c.guarded.servers {
		all = append(all, guard.Port{Address: at.Addr(), Number: at.Port(), Owner: "the API server at " + at.String()})
	}
	return all
}

// placeGuard takes where this node is. Its options have the API servers on its addresses then.
func (c *serviceController) placeGuard(s whereabouts) {
	c.guarded.at, c.guarded.held = s, setOf(s.held)
	c.keepServers()
}

// guardPorts lists for the plugin which ports of this node no pod gets, where that has changed, or the file is gone. It returns the
// Services that this changes.
func (c *serviceController) guardPorts() (changed []service.Name) {
	if c.keepServers() {
		changed = c.state.Configure(c.options(c.guarded.at), c.model)
	}
	path := filepath.Join(c.cfg.State, endpoint.GuardFile)
	if _, err := os.Lstat(path); err == nil && c.guarded.listed && c.guarded.generation == c.checks.generation {
		return changed
	}
	here := c.guardedHere()
	all := slices.Clone(here)
	for _, name := range slices.SortedFunc(maps.Keys(c.checks.checks), service.Name.Compare) {
		all = append(all, guard.Port{Number: c.checks.checks[name].port, Owner: fmt.Sprintf("the health checks of Service %s (healthCheckNodePort)", name)})
	}
	err := writeGuard(path, all)
	c.complaints.note("services/guarded ports", err)
	c.guarded.listed, c.guarded.generation = err == nil, c.checks.generation
	c.report(func(r *serviceReport) { r.guarded = here })
	return changed
}

// writeGuard writes the list unless the file has it.
func writeGuard(path string, all guard.Ports) error {
	content, err := endpoint.EncodeGuard(all)
	if err != nil {
		return err
	}
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) { //nolint:gosec // the path is the administrator's
		return nil
	}
	if err := replaceFile(path, content); err != nil {
		return fmt.Errorf("list the ports that no pod gets as a host port: %w", err)
	}
	return nil
}

// guardedHostPorts finds host ports that pods have had since before they were guarded. A pod keeps its ports until it ends.
func (c circumstances) guardedHostPorts() (found []observe.NetworkProblem) {
	all := append(guard.Fixed(), c.guarded...)
	pods := c.podsByLink()
	for _, k := range slices.SortedFunc(maps.Keys(c.hostPorts.entries), hostports.Key.Compare) {
		if k.Proto != wire.TCP {
			continue
		}
		p, is := all.Find(k.Host(), k.Port.Host())
		if !is {
			continue
		}
		found = append(found, observe.NetworkProblem{
			Reason: guardedHostPort, About: k.String(),
			Text:   fmt.Sprintf("host port %v of pod %s takes the port of %s: clients that connect there reach the pod", k, cmp.Or(pods[c.hostPorts.entries[k].Ifindex], "(without a name)"), p.Owner),
			Remedy: "delete the pod, and give it another host port",
		})
	}
	return found
}

// podsByLink are the names of this node's pods by the index of their link.
func (s *state) podsByLink() map[uint32]string {
	pods := make(map[uint32]string, len(s.view.endpoints))
	for _, e := range s.view.endpoints {
		pods[uint32(e.HostIndex)] = e.Pod
	}
	return pods
}
