package agent

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"net"
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

// guardedHere are the ports of this node's own processes that no pod gets, beside guard.Fixed: of the agent, and of an API server on
// an address of this node.
func (c *serviceController) guardedHere() guard.Ports {
	all := c.cfg.guardedByConfig()
	for at, proto := range c.model.APIServerPorts(c.addressesOfAPI()) {
		p := guard.Port{Address: at.Addr().Unmap(), Number: at.Port(), Owner: "the API server at " + at.String()}
		if proto == wire.TCP && c.held[p.Address] && !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all
}

// guardPorts lists for the plugin which ports of this node no pod gets.
func (c *serviceController) guardPorts() {
	here := c.guardedHere()
	all := slices.Clone(here)
	for _, name := range slices.SortedFunc(maps.Keys(c.checks.checks), service.Name.Compare) {
		all = append(all, guard.Port{Number: c.checks.checks[name].port, Owner: fmt.Sprintf("the health checks of Service %s (healthCheckNodePort)", name)})
	}
	c.complaints.note("services/guarded ports", writeGuard(c.cfg.State, all))
	c.report(func(r *serviceReport) { r.guarded = here })
}

// writeGuard writes the list unless the file has it.
func writeGuard(stateDir string, all guard.Ports) error {
	content, err := endpoint.EncodeGuard(all)
	if err != nil {
		return err
	}
	path := filepath.Join(stateDir, endpoint.GuardFile)
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
			Text:   fmt.Sprintf("host port %v of pod %s takes the port of %s: whoever asks there reaches the pod", k, cmp.Or(pods[c.hostPorts.entries[k].Ifindex], "(without a name)"), p.Owner),
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
