package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// An ipam type other than host-local is a plugin, executed as the specification says: found in CNI_PATH, with this
// call's environment and configuration. It may take any time, so the node's lock is not held meanwhile.

// ipamSource is what allocates addresses: host-local, or an ipam plugin with the configuration to call it with.
type ipamSource struct {
	ipam string
	conf []byte // nil: not known, so the plugin can't be called
}

func (s ipamSource) hostLocal() bool { return s.ipam == endpoint.HostLocal }

// configured is the source in the call's configuration.
func (c *call) configured() ipamSource { return ipamSource{c.ipamType, c.raw} }

// sourceOf is the source of an endpoint's addresses, which the configuration may have changed since.
func (c *call) sourceOf(e endpoint.Endpoint) (ipamSource, error) {
	switch {
	case e.IPAM == "" || e.IPAM == c.ipamType && len(e.IPAMConf) == 0:
		return c.configured(), nil
	case e.IPAM == endpoint.HostLocal || len(e.IPAMConf) == 0:
		return ipamSource{ipam: e.IPAM}, nil
	}
	var conf fields
	if err := json.Unmarshal(e.IPAMConf, &conf); err != nil {
		return ipamSource{}, fmt.Errorf("read the configuration of endpoint %s: %w", e.ID, err)
	}
	if conf == nil {
		conf = fields{}
	}
	if prev, ok := c.fields["prevResult"]; ok { // that of this call, as the specification says
		conf["prevResult"] = prev
	}
	raw, err := json.Marshal(conf)
	return ipamSource{e.IPAM, raw}, err
}

// findSource is sourceOf for an attachment. Without a state file, an address in the store means host-local.
func (c *call) findSource(id endpoint.ID) (ipamSource, error) {
	e, err := endpoint.Read(c.stateDir, id)
	switch {
	case err == nil:
		return c.sourceOf(e)
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, endpoint.ErrUnreadable):
		return ipamSource{}, err
	}
	s, err := ipam.Open(c.stateDir, c.network, ipam.Options{})
	if err != nil {
		return ipamSource{}, err
	}
	owned, err := s.Owned(ipam.Owner(id))
	if len(owned) > 0 {
		return ipamSource{ipam: endpoint.HostLocal}, nil
	}
	return c.configured(), err
}

// returnAddresses has an ipam plugin free the addresses of a released endpoint, and then removes the state file, which
// has the plugin's configuration.
func (c *call) returnAddresses(ctx context.Context, src ipamSource, id endpoint.ID, args *invoke.Args) error {
	_, missing := c.find(src.ipam)
	switch {
	case src.conf == nil:
		c.log.Warn("addresses not given back: the state file, of an earlier version, lacks the ipam plugin's configuration", "ipam", src.ipam)
	case missing != nil && src.ipam != c.ipamType: // the one in the configuration may just be replaced
		c.log.Warn("addresses not given back: their ipam plugin is no longer installed", "ipam", src.ipam, "error", missing)
	default:
		if err := c.ask(ctx, src, args); err != nil {
			return err
		}
	}
	err := c.shared(func(context.Context) error {
		if e, err := endpoint.Read(c.stateDir, id); err == nil && !e.Releasing {
			return nil // an ADD has come in between
		}
		return endpoint.Remove(c.stateDir, id)
	})
	if errors.Is(err, endpoint.ErrNoDataplane) || errors.Is(err, errNoRoom) {
		return nil // there is no state file either
	}
	return err
}

// delegateAdd gets addresses from the ipam plugin.
func (a *addition) delegateAdd() error {
	path, err := a.find(a.ipamType)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.delegateWait)
	defer cancel()
	got, err := invoke.ExecPluginWithResult(ctx, path, a.raw, a.delegateArgs("ADD"), &executor{})
	if ctx.Err() != nil {
		a.delegateUndo()
		return noAnswer(a.ipamType, "ADD", a.delegateWait)
	}
	if err != nil {
		return err
	}
	a.result, err = toCurrent(got)
	if err != nil {
		a.delegateUndo()
		return fmt.Errorf("result of ipam plugin %s: %w", a.ipamType, err)
	}
	return nil
}

// delegateUndo gives back the addresses of a failed ADD, unless they are in use: its link is still there, or another ADD
// of the attachment has succeeded meanwhile.
func (a *addition) delegateUndo() {
	_, err := endpoint.Read(a.stateDir, a.id)
	if errors.Is(err, fs.ErrNotExist) {
		_, err = a.work.Host.LinkByName(a.id.HostLinkName())
	}
	if errors.Is(err, device.ErrNotFound) {
		err = a.ask(context.Background(), a.configured(), a.delegateArgs("DEL"))
	} else {
		err = errors.Join(errors.New("the attachment still exists"), err)
	}
	if err != nil {
		a.log.Error("addresses of the failed ADD not given back, DEL will do it", "ipam", a.ipamType, "error", err)
	}
}

// useDelegated takes addresses, routes and DNS settings from the ipam plugin's result. The prefix lengths are ignored.
func (a *addition) useDelegated() error {
	given := a.result
	a.result = nil
	if len(given.IPs) == 0 {
		return fmt.Errorf("ipam plugin %s allocated no address", a.ipamType)
	}
	families := map[wire.Family]bool{}
	for _, ip := range given.IPs {
		addr := toAddr(ip.Address.IP)
		if !ipam.Assignable(addr) {
			return fmt.Errorf("ipam plugin %s allocated %s, which no pod can have", a.ipamType, ip.Address.IP)
		}
		if families[wire.FamilyOf(addr)] {
			return fmt.Errorf("ipam plugin %s allocated two addresses of one family, but a pod has one of each", a.ipamType)
		}
		families[wire.FamilyOf(addr)] = true
		if err := a.checkMTU(a.id.IfName, addr); err != nil {
			return err
		}
		a.work.Addresses = append(a.work.Addresses, addr)
	}
	for _, r := range given.Routes {
		if r != nil && toPrefix(&r.Dst).IsValid() {
			a.routes = append(a.routes, r)
		}
	}
	a.resolv = given.DNS
	return nil
}

// ask executes an ipam plugin's operation that has no result.
func (c *call) ask(ctx context.Context, src ipamSource, args *invoke.Args) error {
	path, err := c.find(src.ipam)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.delegateWait)
	defer cancel()
	started := time.Now()
	err = invoke.ExecPluginWithoutResult(ctx, path, src.conf, args, &executor{})
	if ctx.Err() != nil {
		return noAnswer(src.ipam, args.Command, time.Since(started).Round(time.Millisecond))
	}
	return err
}

func noAnswer(plugin, verb string, within time.Duration) error {
	return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("ipam plugin %s has not finished %s within %s", plugin, verb, within), "")
}

func (c *call) find(plugin string) (string, error) {
	path, err := invoke.FindInPath(plugin, filepath.SplitList(c.args.Path))
	if err != nil {
		return "", fieldError("ipam.type", err.Error())
	}
	return path, nil
}

func (c *call) delegateArgs(verb string) *invoke.Args {
	return &invoke.Args{
		Command: verb, ContainerID: c.args.ContainerID, NetNS: c.args.Netns, IfName: c.args.IfName,
		PluginArgsStr: c.args.Args, Path: c.args.Path,
	}
}

// delegatesVerb reports whether there is an ipam plugin to call for an operation that the specification has
// since that version.
func (c *call) delegatesVerb(since string) bool {
	ok, err := version.GreaterThanOrEqualTo(c.version, since)
	return err == nil && ok && !c.hostLocal()
}

// unsupported reports whether the error means that a plugin does not know an operation. For GC and STATUS, which are
// newer than many plugins, that is no failure.
func unsupported(err error) bool {
	var e *types.Error
	return errors.As(err, &e) && (e.Code == types.ErrInvalidEnvironmentVariables || e.Code == types.ErrIncompatibleCNIVersion)
}
