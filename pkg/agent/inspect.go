package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
)

func isUplinkHook(h attach.Hook) bool { return h == attach.FromUplink || h == attach.ToUplink }

// inspect looks for what can be taken away without a notice and puts it back:
// pins, attachments, the list, forwarding, the reserved ports. It reports whether the whole node
// should be looked at.
func (r *reconciler) inspect(ctx context.Context) bool {
	restored, err := r.dp.RestorePins()
	for _, path := range restored {
		r.log.Warn("pin restored", "path", path)
	}
	errs := []error{err}
	for _, l := range r.view.uplinks {
		errs = append(errs, r.inspectUplink(int(l.Index), l.Name))
	}
	errs = append(errs, r.sysctls.holdForwarding(r.view.uplinkNames()), r.sysctls.holdPorts(r.cfg.SnatLow, r.cfg.SnatHigh))
	if r.status.isReady() && stampOf(r.listPath()) != r.list {
		r.log.Warn("network configuration list was changed or removed, writing it again", "file", r.listPath())
		errs = append(errs, r.writeList())
	}
	if r.status.isReady() && r.portmapChanged() {
		errs = append(errs, r.writeList())
	}
	if err := errors.Join(errs...); err != nil && ctx.Err() == nil {
		r.complain("inspect", err)
		return true
	}
	r.settled("inspect")
	return r.pluginGone() || r.podDetached()
}

// portmapChanged says that the plugin for host ports has come or gone, or is
// another, since the list was written: no pod starts while the list names one
// that is not there.
func (r *reconciler) portmapChanged() bool {
	return r.cfg.Portmap != PortmapOff && r.cfg.Bin != "" && stampOf(filepath.Join(r.cfg.Bin, install.Portmap)) != r.portmap.stamp
}

func (r *reconciler) inspectUplink(index int, name string) error {
	for _, hook := range []attach.Hook{attach.FromUplink, attach.ToUplink} {
		if ok, err := r.dp.Attached(index, hook); ok || err != nil {
			continue // what can't be told is for the whole look
		}
		if _, err := r.host.LinkByIndex(index); err != nil {
			return nil //nolint:nilerr // the link is going; the kernel tells of that
		}
		if err := r.dp.Attach(index, hook); err != nil {
			return err
		}
		r.log.Warn("program attached again", "interface", name, "hook", string(hook))
	}
	return nil
}

func (r *reconciler) podDetached() bool {
	for _, e := range r.view.endpoints {
		if l := r.view.links[e.HostIndex]; l.Name != e.HostName || e.Releasing {
			continue
		}
		if ok, err := r.dp.Attached(e.HostIndex, attach.FromPod); !ok && err == nil { // what can't be told is no reason
			return true
		}
	}
	return false
}

func (r *reconciler) pluginGone() bool {
	if r.cfg.Bin == "" {
		return false
	}
	_, err := os.Stat(filepath.Join(r.cfg.Bin, install.Plugin))
	return errors.Is(err, os.ErrNotExist)
}
