package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// add is ADD.
func (c *call) add() error {
	a := &addition{call: c}
	defer a.close()
	if err := a.open(); err != nil {
		return err
	}
	if err := a.awaitHostPorts(); err != nil {
		return err
	}
	if c.hostLocal() {
		return c.shared(a.build)
	}
	return a.buildDelegated()
}

// addition is one ADD.
type addition struct {
	*call
	work   endpoint.Work
	routes []*types.Route // from the configuration or the ipam plugin; none: default routes
	resolv types.DNS
	result *current.Result
}

// open checks and opens everything that does not need the lock.
func (a *addition) open() error {
	prev, err := a.prevResult()
	if err != nil {
		return err
	}
	if prev != nil {
		return fieldError("prevResult", "must be absent: this plugin creates the interface, so it must be the first of the list")
	}
	if err := a.readRuntime(); err != nil {
		return err
	}
	if a.bandwidth {
		a.log.Warn("bandwidth limit ignored: traffic shaping is not supported yet")
	}
	ignored := a.unknown
	if a.hostLocal() {
		if err := a.readPool(); err != nil {
			return err
		}
		ignored = append(ignored, a.work.Pool.Unknown...)
	}
	a.tellIgnored(ignored)
	if err := device.CheckName(a.id.IfName); err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_IFNAME: no interface can be called %s: it %s", a.id.IfName, err), "")
	}
	w := &a.work
	if w.Namespace, err = openNetNS(a.args.Netns); err != nil {
		return err
	}
	if w.Node, err = a.releaser().Open(); err != nil {
		return err
	}
	if w.Inside, err = device.OpenIn(w.Namespace); err != nil {
		return err
	}
	return a.describe()
}

// readPool reads host-local's configuration: what to allocate addresses from, routes and DNS settings.
func (a *addition) readPool() error {
	pool, err := a.parseIPAM(a.args.Args, a.id.IfName)
	if err != nil {
		return err
	}
	if pool.ResolvConf != "" {
		if a.resolv, err = ipam.ReadResolvConf(pool.ResolvConf); err != nil {
			return fieldError("ipam.resolvConf", err.Error())
		}
	}
	a.work.Pool, a.routes = &pool, pool.Routes
	return nil
}

// describe fills in the endpoint's state, except what is known only after it was made.
func (a *addition) describe() error {
	ns, err := inode(a.work.Namespace)
	if err != nil {
		return err
	}
	host, pod, err := macs(a.mac)
	if err != nil {
		return err
	}
	a.work.Endpoint = endpoint.Endpoint{
		ID: a.id, Network: a.network, NetNS: a.args.Netns, NetNSInode: ns, HostName: a.id.HostLinkName(),
		HostMAC: wire.MAC(host), PodMAC: wire.MAC(pod), MTU: a.mtu, IPAM: a.ipamType, Portmap: a.portmap,
		Pod: a.pod, PodUID: a.podUID,
	}
	if !a.hostLocal() {
		a.work.IPAMConf = a.raw
	}
	a.work.OnAddresses = a.answer
	return nil
}

func (a *addition) close() {
	if a.work.Inside != nil {
		a.work.Inside.Close()
	}
	if a.work.Node != nil {
		a.work.Close()
	}
	if a.work.Namespace != nil {
		a.work.Namespace.Close()
	}
}

// buildDelegated calls another ipam plugin for the addresses, without holding the lock, after checking that the node is
// ready for a pod.
func (a *addition) buildDelegated() error {
	var repeated bool
	err := a.shared(func(ctx context.Context) (err error) {
		if repeated, err = a.repeat(ctx); repeated || err != nil {
			return err
		}
		return a.work.Ready(a.attach)
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

// build makes the endpoint; after an error nothing of it is left.
func (a *addition) build(ctx context.Context) (err error) {
	repeated, err := a.repeat(ctx)
	if repeated || err != nil {
		return err
	}
	if err := a.work.Ready(a.attach); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			a.undo()
		}
	}()
	if err := a.work.Make(ctx); err != nil {
		return a.refusal(err)
	}
	if a.step != nil {
		if err := a.step("result"); err != nil {
			return err
		}
	}
	if err := a.printResult(); err != nil {
		return err
	}
	a.log.Info("endpoint added", "addresses", a.work.Addresses, "link", a.work.HostName, "ifindex", a.work.HostIndex)
	return nil
}

// undo releases what was made, without a quarantine for addresses that cannot have been in use yet.
func (a *addition) undo() {
	ctx, cancel := context.WithTimeout(context.Background(), undoWait)
	defer cancel()
	r := a.releaser()
	r.Unused = !a.work.WasUp
	if err := r.ReleaseLocked(ctx, a.id, a.network); err != nil {
		a.log.Error("failed ADD could not be undone, DEL or GC will release it", "error", err)
	}
}

// refusal gives errors that the runtime can act on their own codes.
func (a *addition) refusal(err error) error {
	if taken, ok := errors.AsType[*endpoint.TakenError](err); ok {
		return types.NewError(codeNoAddress, taken.Error()+"; "+
			"remove that, or make sure that no two networks of this node allocate the same addresses", "")
	}
	if taken, ok := errors.AsType[*endpoint.HostPortTakenError](err); ok {
		return types.NewError(codeHostPort, taken.Error()+"; ask for another port, or run the pod on another node", "")
	}
	if share, ok := errors.AsType[*endpoint.HostPortShareError](err); ok {
		return types.NewError(codeHostPort, share.Error()+"; ask for fewer, or run the pod on another node", "")
	}
	switch {
	case errors.Is(err, ipam.ErrExhausted):
		return types.NewError(codeNoAddress, err.Error(), "")
	case errors.Is(err, endpoint.ErrNameTaken):
		return types.NewError(codeExists, fmt.Sprintf("interface %s exists already in %s and does not belong to this attachment",
			a.id.IfName, a.args.Netns), err.Error())
	}
	return err
}

func inode(ns *device.NetNS) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(ns.FD(), &st); err != nil {
		return 0, fmt.Errorf("stat network namespace %s: %w", ns.Path(), err)
	}
	return st.Ino, nil
}

// answer makes the result, which a repeated ADD returns again, and the pod's routes and host ports.
func (a *addition) answer() (err error) {
	if a.work.HostPorts, err = a.hostPorts(a.work.Addresses); err != nil {
		return err
	}
	a.tellUnanswered(a.work.Addresses)
	a.result = a.makeResult()
	for _, r := range a.result.Routes {
		a.work.Routes = append(a.work.Routes, toRoute(r))
	}
	if a.work.Result, err = json.Marshal(a.result); err != nil {
		return fmt.Errorf("encode result: %w", err)
	}
	return nil
}
