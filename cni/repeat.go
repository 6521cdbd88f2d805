package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// repeat answers an ADD for an attachment that exists: with the same result when it is complete and in the same
// namespace, else with an error. One that is known to be half made or half gone is released, and ADD goes on.
func (a *addition) repeat(ctx context.Context) (bool, error) {
	e, err := endpoint.Read(a.stateDir, a.id)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, endpoint.ErrUnreadable):
		return false, a.refuseRunning(err)
	case err != nil:
		return false, err
	case e.Releasing:
		return false, a.releaseRest(ctx, e, "an earlier DEL never ended")
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
		return false, a.releaseRest(ctx, e, gap)
	}
	a.result = &current.Result{}
	if err := json.Unmarshal(e.Result, a.result); err != nil {
		return false, a.exists("and the result of its ADD is unreadable: " + err.Error())
	}
	a.log.Info("endpoint exists already, same result")
	return true, a.printResult()
}

func (a *addition) exists(how string) error {
	return types.NewError(codeExists, fmt.Sprintf("%s of container %s exists already %s", a.id.IfName, a.id.ContainerID, how), "call DEL first")
}

// refuseRunning refuses an attachment that is complete although its state can't be read, for that reason: its pod may
// be running. One that is not complete is what a killed ADD has left.
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
		return a.exists("without its state: " + reason.Error())
	}
	return err
}

// releaseRest releases what is left of an endpoint, so that ADD can go on. If another ipam plugin gave its addresses than
// the one that is about to give new ones, only DEL can give them back.
func (a *addition) releaseRest(ctx context.Context, e endpoint.Endpoint, why string) error {
	by, err := a.giverOf(e)
	if err != nil {
		return err
	}
	if !by.hostLocal() && by.ipam != a.ipamType {
		return a.exists(fmt.Sprintf("in part (%s), with addresses of ipam plugin %s", why, by.ipam))
	}
	a.log.Warn("releasing what is left of the attachment first", "reason", why)
	return a.releaser().ReleaseLocked(ctx, a.id, a.network)
}
