package cni

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Another ipam type is a plugin of its own, executed as the specification says: found in CNI_PATH, with this call's
// environment and configuration. The node's lock is never held meanwhile: how long it takes is not ours to know.

// delegateAdd gets addresses from the ipam plugin.
func (a *addition) delegateAdd() error {
	path, err := a.findIPAM()
	if err != nil {
		return err
	}
	got, err := invoke.ExecPluginWithResult(context.Background(), path, a.raw, a.delegateArgs("ADD"), nil)
	if err != nil {
		return err
	}
	a.result, err = toCurrent(got)
	if err != nil {
		return errors.Join(fmt.Errorf("result of ipam plugin %s: %w", a.ipamType, err), a.delegateDel())
	}
	return nil
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
		a.addresses = append(a.addresses, addr)
	}
	for _, r := range given.Routes {
		if r != nil && toPrefix(&r.Dst).IsValid() {
			a.routes = append(a.routes, r)
		}
	}
	a.resolv = given.DNS
	return a.checkMTU()
}

func (c *call) delegateDel() error {
	return c.delegate("DEL", c.raw)
}

// delegate executes the ipam plugin for an operation without a result.
func (c *call) delegate(verb string, conf []byte) error {
	path, err := c.findIPAM()
	if err != nil {
		return err
	}
	return invoke.ExecPluginWithoutResult(context.Background(), path, conf, c.delegateArgs(verb), nil)
}

func (c *call) findIPAM() (string, error) {
	path, err := invoke.FindInPath(c.ipamType, filepath.SplitList(c.args.Path))
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
