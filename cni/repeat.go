package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// repeat answers an ADD for an attachment that exists: with the same result if it is complete, in the same namespace and
// with the same host ports, else with an error. If it is known to be incomplete it is released, and ADD goes on (false).
func (a *addition) repeat(ctx context.Context) (bool, error) {
	e, err := endpoint.Read(a.stateDir, a.id)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, endpoint.ErrUnreadable):
		return false, a.refuseRunning(err)
	case err != nil:
		return false, err
	case e.Releasing:
		return false, a.releaseLeftovers(ctx, e, "an earlier DEL did not finish")
	}
	if err := a.work.Ready(a.attach); err != nil {
		return false, err
	}
	if e.NetNSInode != a.work.NetNSInode || e.Network != a.network {
		return false, a.exists(fmt.Sprintf("in network %s and namespace %s", e.Network, e.NetNS))
	}
	there := endpoint.Work{Node: a.work.Node, Endpoint: e}
	gap, err := there.Gap()
	if err != nil {
		return false, err
	}
	if gap != "" {
		if err := there.CheckFree(); err != nil {
			return false, a.refusal(err)
		}
		return false, a.releaseLeftovers(ctx, e, gap)
	}
	asked, err := a.hostPorts(e.Addresses)
	if err != nil {
		return false, err
	}
	if !slices.Equal(asked, e.HostPorts) {
		return false, a.exists("with other host ports")
	}
	a.result = &current.Result{}
	if err := json.Unmarshal(e.Result, a.result); err != nil {
		return false, a.exists("but the result of its ADD is unreadable: " + err.Error())
	}
	a.log.Info("endpoint exists already, same result returned")
	return true, a.printResult()
}

func (a *addition) exists(how string) error {
	return types.NewError(codeExists, fmt.Sprintf("interface %s of container %s exists already %s", a.id.IfName, a.id.ContainerID, how), "call DEL first")
}

// refuseRunning refuses an ADD if the attachment is complete although its state file can't be read, for that reason: its
// pod may be running. If it is not complete, a killed ADD has left it.
func (a *addition) refuseRunning(reason error) error {
	l, err := a.work.Host.LinkByName(a.id.HostLinkName())
	if errors.Is(err, device.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := a.work.Ready(a.attach); err != nil {
		return err
	}
	complete, err := a.work.ByLink()
	if len(complete[l.Index]) > 0 {
		return a.exists("without a readable state file: " + reason.Error())
	}
	return err
}

// releaseLeftovers releases what is left of an endpoint, so that ADD can go on. If the addresses are of another ipam
// plugin than the configured one, only DEL can give them back.
func (a *addition) releaseLeftovers(ctx context.Context, e endpoint.Endpoint, why string) error {
	src, err := a.sourceOf(e)
	if err != nil {
		return err
	}
	if !src.hostLocal() && src.ipam != a.ipamType {
		return a.exists(fmt.Sprintf("in part (%s), with addresses of ipam plugin %s", why, src.ipam))
	}
	a.log.Warn("releasing what is left of the attachment first", "reason", why)
	return a.releaser().ReleaseLocked(ctx, a.id, a.network)
}
