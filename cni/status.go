package cni

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// podInterface is what runtimes call pods' interfaces, for the errors of STATUS, which is about none.
const podInterface = "eth0"

// status is STATUS: would an ADD succeed now? Whether the agent runs does not matter. That no address is free is not
// reported either: runtimes would mark the whole node as not ready, and its pods would be moved away.
func (c *call) status() error {
	err := c.ready()
	if _, coded := errors.AsType[*types.Error](err); err == nil || coded {
		return err
	}
	return types.NewError(types.ErrPluginNotAvailable, err.Error(), "")
}

func (c *call) ready() error {
	if c.hostLocal() {
		if _, err := c.parseIPAM("", podInterface); err != nil {
			return err
		}
	}
	if err := c.dataplaneReady(); err != nil {
		return err
	}
	if !c.delegatesVerb("1.1.0") {
		return nil
	}
	if err := c.ask(context.Background(), c.configured(), c.delegateArgs("STATUS")); err != nil && !unsupported(err) {
		return fmt.Errorf("ipam plugin %s: %w", c.ipamType, err)
	}
	return nil
}

func (c *call) dataplaneReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), c.wait)
	defer cancel()
	l, err := bpffs.Shared(ctx, c.stateDir, c.verb)
	if err != nil {
		return err
	}
	defer l.Release()
	n, err := c.releaser().Open()
	if err != nil {
		return err
	}
	defer n.Close()
	return n.Ready(c.attach)
}
