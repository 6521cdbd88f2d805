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

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// Another ipam type is a plugin of its own, executed as the specification says: found in CNI_PATH, with this call's
// environment and configuration. The node's lock is never held meanwhile: how long it takes is not ours to know.

// giver is who gives the addresses: the store (host-local), or an ipam plugin and the configuration to ask it with.
type giver struct {
	ipam string
	conf []byte // nil: what it was asked with is not known, so it can't be asked again
}

func (g giver) hostLocal() bool { return g.ipam == endpoint.HostLocal }

// listed is the giver of the call's configuration.
func (c *call) listed() giver { return giver{c.ipamType, c.raw} }

// giverOf is who has given an endpoint its addresses, whatever the list says by now.
func (c *call) giverOf(e endpoint.Endpoint) (giver, error) {
	switch {
	case e.IPAM == "" || e.IPAM == c.ipamType && len(e.IPAMConf) == 0:
		return c.listed(), nil
	case e.IPAM == endpoint.HostLocal || len(e.IPAMConf) == 0:
		return giver{ipam: e.IPAM}, nil
	}
	var conf fields
	if err := json.Unmarshal(e.IPAMConf, &conf); err != nil {
		return giver{}, fmt.Errorf("read the configuration of endpoint %s: %w", e.ID, err)
	}
	if conf == nil {
		conf = fields{}
	}
	if prev, ok := c.fields["prevResult"]; ok { // this call's, as the specification says
		conf["prevResult"] = prev
	}
	raw, err := json.Marshal(conf)
	return giver{e.IPAM, raw}, err
}

// findGiver is giverOf for an attachment. Without a state file an address in the store says it.
func (c *call) findGiver(id endpoint.ID) (giver, error) {
	e, err := endpoint.Read(c.stateDir, id)
	switch {
	case err == nil:
		return c.giverOf(e)
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, endpoint.ErrUnreadable):
		return giver{}, err
	}
	s, err := ipam.Open(c.stateDir, c.network, ipam.Options{})
	if err != nil {
		return giver{}, err
	}
	owned, err := s.Owned(ipam.Owner(id))
	if len(owned) > 0 {
		return giver{ipam: endpoint.HostLocal}, nil
	}
	return c.listed(), err
}

// giveBack has an ipam plugin free what it gave a released endpoint. Only then the state file goes, which says how.
func (c *call) giveBack(ctx context.Context, by giver, id endpoint.ID, args *invoke.Args) error {
	_, missing := c.find(by.ipam)
	switch {
	case by.conf == nil:
		c.log.Warn("addresses not given back: an earlier version has not written down how", "ipam", by.ipam)
	case missing != nil && by.ipam != c.ipamType: // what the list names may just be in replacement
		c.log.Warn("addresses not given back: their ipam plugin is no longer installed", "ipam", by.ipam, "error", missing)
	default:
		if err := c.ask(ctx, by, args); err != nil {
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
		return nil // then there is no file
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

// delegateUndo gives back what a failed ADD was given, unless its link is still there, which has the addresses, or
// another ADD of the attachment has succeeded meanwhile.
func (a *addition) delegateUndo() {
	_, err := endpoint.Read(a.stateDir, a.id)
	if errors.Is(err, fs.ErrNotExist) {
		_, err = a.work.Host.LinkByName(a.id.HostLinkName())
	}
	if errors.Is(err, device.ErrNotFound) {
		err = a.ask(context.Background(), a.listed(), a.delegateArgs("DEL"))
	} else {
		err = errors.Join(errors.New("the attachment is still there"), err)
	}
	if err != nil {
		a.log.Error("addresses of the failed ADD not given back, DEL will", "ipam", a.ipamType, "error", err)
	}
}

// useDelegated takes over what the ipam plugin answered. How wide it believes the subnet to be says nothing here.
func (a *addition) useDelegated() error {
	given := a.result
	a.result = nil
	if len(given.IPs) == 0 {
		return fmt.Errorf("ipam plugin %s gave no address", a.ipamType)
	}
	families := map[bool]bool{}
	for _, ip := range given.IPs {
		addr := toAddr(ip.Address.IP)
		if !addr.IsValid() || addr.IsUnspecified() || addr.IsMulticast() || addr.IsLoopback() {
			return fmt.Errorf("ipam plugin %s gave %s, which no pod can have", a.ipamType, ip.Address.IP)
		}
		if families[addr.Is4()] {
			return fmt.Errorf("ipam plugin %s gave two addresses of one family, and a pod has one of each", a.ipamType)
		}
		families[addr.Is4()] = true
		if err := a.checkMTU(addr); err != nil {
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

// ask executes an ipam plugin for an operation without a result.
func (c *call) ask(ctx context.Context, g giver, args *invoke.Args) error {
	path, err := c.find(g.ipam)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.delegateWait)
	defer cancel()
	started := time.Now()
	err = invoke.ExecPluginWithoutResult(ctx, path, g.conf, args, &executor{})
	if ctx.Err() != nil {
		return noAnswer(g.ipam, args.Command, time.Since(started).Round(time.Millisecond))
	}
	return err
}

func noAnswer(plugin, verb string, within time.Duration) error {
	return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("ipam plugin %s has not done %s within %s", plugin, verb, within), "")
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

// delegatesVerb says whether the version of the specification has the operation at all.
func (c *call) delegatesVerb(since string) bool {
	ok, err := version.GreaterThanOrEqualTo(c.version, since)
	return err == nil && ok && !c.hostLocal()
}

// unsupported says that a plugin does not know an operation, which is no failure of GC and STATUS: they are newer
// than many plugins.
func unsupported(err error) bool {
	var e *types.Error
	return errors.As(err, &e) && (e.Code == types.ErrInvalidEnvironmentVariables || e.Code == types.ErrIncompatibleCNIVersion)
}
