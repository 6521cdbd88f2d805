package cni

import (
	"context"
	"encoding/json"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// portmapPlugin opens host ports by rules of netfilter where it is chained after ours. The runtime calls it for as long as
// it is in the list; the rules of pods that were made before it was taken out are left to us.
const portmapPlugin = "portmap"

// hadPortmap reports whether it was chained when ADD made the attachment.
func (c *call) hadPortmap(id endpoint.ID) bool {
	e, err := endpoint.Read(c.stateDir, id)
	return err == nil && e.Portmap
}

// removePortmap has it remove the rules of a released endpoint. Where that fails they lead nowhere, and the agent removes
// them.
func (c *call) removePortmap(ctx context.Context, args *invoke.Args) {
	// Any mapping will do: it removes all that has the container's name, but nothing if it is told of none.
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "0.4.0", "name": c.network, "type": portmapPlugin,
		"runtimeConfig": map[string]any{"portMappings": []map[string]any{{"hostPort": 1, "containerPort": 1, "protocol": "tcp"}}},
	})
	if err == nil {
		err = c.execute(ctx, portmapPlugin, conf, args)
	}
	if err != nil {
		c.log.Warn("portmap's rules for the pod not removed, the agent will do it", "container", args.ContainerID, "error", err)
	}
}

func (c *call) execute(ctx context.Context, plugin string, conf []byte, args *invoke.Args) error {
	path, err := invoke.FindInPath(plugin, filepath.SplitList(c.args.Path))
	if err != nil {
		return err
	}
	return invoke.ExecPluginWithoutResult(ctx, path, conf, args, &executor{})
}
