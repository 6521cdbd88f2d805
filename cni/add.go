package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// add is ADD.
func (p *plugin) add(args *skel.CmdArgs) error {
	c, done, err := p.begin("ADD", args)
	if err != nil {
		return err
	}
	defer done()
	return c.finish(c.addEndpoint())
}

func (c *call) addEndpoint() error {
	a := &addition{call: c}
	defer a.close()
	if err := a.open(); err != nil {
		return err
	}
	if c.hostLocal() {
		return c.shared(a.build)
	}
	return a.buildDelegated()
}

// addition is one ADD on its way.
type addition struct {
	*call
	ipam      ipam.Config // host-local only
	netns     *device.NetNS
	host, pod *device.Handle
	plane     *dataplane

	addresses []netip.Addr
	routes    []*types.Route
	resolv    types.DNS

	hostMAC, podMAC net.HardwareAddr
	hostLink        device.Link
	wasUp           bool // a packet of the pod may have left
	result          *current.Result
}

// open checks and opens what can be without the lock.
func (a *addition) open() (err error) {
	prev, err := a.prevResult()
	if err != nil {
		return err
	}
	if prev != nil {
		return fieldError("prevResult", "must be absent: this plugin makes the interface, put it first in the list")
	}
	if a.bandwidth {
		a.log.Warn("bandwidth is asked for, and traffic is not shaped yet")
	}
	if a.hostLocal() {
		if a.ipam, err = a.parseIPAM(a.args.Args); err != nil {
			return err
		}
		for _, name := range a.ipam.Unknown {
			a.log.Warn("unknown field of the network configuration ignored", "field", name)
		}
	}
	if err := device.CheckName(a.id.IfName); err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_IFNAME: no interface can be called %s: it %s", a.id.IfName, err), "")
	}
	if a.hostMAC, a.podMAC, err = macs(a.mac); err != nil {
		return err
	}
	if a.netns, err = openNetNS(a.args.Netns); err != nil {
		return err
	}
	if a.host, err = device.Open(); err != nil {
		return err
	}
	a.pod, err = device.OpenIn(a.netns)
	return err
}

func (a *addition) close() {
	if a.pod != nil {
		a.pod.Close()
	}
	if a.host != nil {
		a.host.Close()
	}
	if a.netns != nil {
		a.netns.Close()
	}
	if a.plane != nil {
		a.plane.close()
	}
}

// buildDelegated asks another plugin for the addresses, without holding the lock, but not before it is known that the
// node can carry a pod.
func (a *addition) buildDelegated() error {
	var repeated bool
	err := a.shared(func(ctx context.Context) (err error) {
		if repeated, err = a.repeat(ctx); repeated || err != nil {
			return err
		}
		return a.openDataplane()
	})
	if repeated || err != nil {
		return err
	}
	if err := a.delegateAdd(); err != nil {
		return err
	}
	err = a.useDelegated()
	if err == nil {
		err = a.shared(a.build)
	}
	if err != nil {
		a.delegateUndo()
	}
	return err
}

func (a *addition) openDataplane() (err error) {
	if a.plane != nil {
		a.plane.close()
	}
	a.plane, err = openDataplane(a.pins)
	return err
}

type step struct {
	name string
	do   func(context.Context) error
}

// steps are ADD in order. Nothing can reach the pod, and the pod can reach nothing, before its program is attached:
// the link comes up after that. The endpoints entry, which makes others' packets go there, is the last thing.
func (a *addition) steps() []step {
	return []step{
		{"address", a.takeAddresses},
		{"veth", a.createVeth},
		{"pod", a.configurePod},
		{"sysctl", a.setSysctls},
		{"attach", a.attachProgram},
		{"device", a.writeDevice},
		{"up", a.setUp},
		{"route", a.writeRoutes},
		{"state", a.writeState},
		{"destination", a.writeDestinations},
		{"map", a.writeEndpoints},
		{"result", a.printResult},
	}
}

// build makes the endpoint, or nothing of it.
func (a *addition) build(ctx context.Context) (err error) {
	repeated, err := a.repeat(ctx)
	if repeated || err != nil {
		return err
	}
	if err := a.openDataplane(); err != nil {
		return err
	}
	if err := a.clearRemnants(ctx); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			a.undo()
		}
	}()
	for _, s := range a.steps() {
		if a.step != nil {
			if err := a.step(s.name); err != nil {
				return err
			}
		}
		if err := s.do(ctx); err != nil {
			return err
		}
	}
	a.log.Info("endpoint added", "addresses", a.addresses, "link", a.hostLink.Name, "ifindex", a.hostLink.Index)
	return nil
}

// undo takes away what was made; addresses that cannot have been in use yet need no rest.
func (a *addition) undo() {
	ctx, cancel := context.WithTimeout(context.Background(), undoWait)
	defer cancel()
	r := a.releaser()
	if !a.wasUp {
		r.Quarantine = 0
	}
	if err := r.ReleaseLocked(ctx, a.id, a.network); err != nil {
		a.log.Error("failed ADD not undone, DEL or GC will", "error", err)
	}
}

func inode(ns *device.NetNS) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(ns.FD(), &st); err != nil {
		return 0, fmt.Errorf("stat network namespace %s: %w", ns.Path(), err)
	}
	return st.Ino, nil
}

func (a *addition) takeAddresses(ctx context.Context) error {
	if a.hostLocal() { // else taken before the lock
		if err := a.takeFromStore(ctx); err != nil {
			return err
		}
	}
	return a.checkFree(a.addresses, 0)
}

func (a *addition) takeFromStore(ctx context.Context) error {
	s, err := ipam.Open(a.stateDir, a.network, ipam.Options{Quarantine: a.quarantine})
	if err != nil {
		return err
	}
	got, err := s.Allocate(ctx, ipam.Owner(a.id), a.ipam)
	if errors.Is(err, ipam.ErrAllocated) {
		if err := a.release(ctx, err.Error()); err != nil {
			return err
		}
		got, err = s.Allocate(ctx, ipam.Owner(a.id), a.ipam)
	}
	if errors.Is(err, ipam.ErrExhausted) {
		return types.NewError(codeNoAddress, err.Error(), "")
	}
	if err != nil {
		return err
	}
	for _, g := range got {
		a.addresses = append(a.addresses, g.Address.Addr())
	}
	a.routes = a.ipam.Routes
	if a.ipam.ResolvConf != "" {
		if a.resolv, err = ipam.ReadResolvConf(a.ipam.ResolvConf); err != nil {
			return fieldError("ipam.resolvConf", err.Error())
		}
	}
	return a.checkMTU()
}

func (a *addition) checkMTU() error {
	for _, addr := range a.addresses {
		if addr.Is6() && a.mtu < minMTUIPv6 {
			return fieldError("mtu", fmt.Sprintf("%d: IPv6 needs at least %d", a.mtu, minMTUIPv6))
		}
	}
	return nil
}

func (a *addition) writeState(context.Context) error {
	ns, err := inode(a.netns)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(a.makeResult())
	if err != nil {
		return fmt.Errorf("encode result: %w", err)
	}
	e := endpoint.Endpoint{
		ID: a.id, Network: a.network, NetNS: a.args.Netns, NetNSInode: ns,
		HostName: a.hostLink.Name, HostIndex: a.hostLink.Index, HostMAC: wire.MAC(a.hostMAC), PodMAC: wire.MAC(a.podMAC),
		MTU: a.mtu, Addresses: a.addresses, IPAM: a.ipamType, Created: time.Now().UTC(), Result: raw,
		Pod: podName(a.args.Args),
	}
	if !a.hostLocal() {
		e.IPAMConf = a.raw
	}
	return endpoint.Write(a.stateDir, e)
}

// podName is the pod's namespace and name where CNI_ARGS tells them, as runtimes of Kubernetes do.
func podName(args string) string {
	told := map[string]string{}
	for pair := range strings.SplitSeq(args, ";") {
		key, value, _ := strings.Cut(pair, "=")
		told[key] = value
	}
	if told["K8S_POD_NAME"] == "" {
		return ""
	}
	return told["K8S_POD_NAMESPACE"] + "/" + told["K8S_POD_NAME"]
}
