package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// TakenError is returned for an address that is somebody else's.
type TakenError struct {
	Address netip.Addr
	// Holder says whose it is, as in "pod shop/web (...)".
	Holder string
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("address %s is taken by %s", e.Address, e.Holder)
}

// Claimer writes entries of the endpoints map, and none in place of one that leads to a link that exists.
type Claimer struct {
	StateDir  string
	Host      *device.Handle
	Endpoints *endpoints.Map
}

// Claim makes the address lead to v's link. It fails with a *TakenError when it leads to another link that exists.
// Waiting for other claims of the address ends with ctx.
func (c Claimer) Claim(ctx context.Context, a netip.Addr, v endpoints.Value) error {
	// No endpoint has this name. Of two that find a dead link in their way only one may take its place.
	l, err := Acquire(ctx, c.StateDir, ID{IfName: a.String()})
	if err != nil {
		return err
	}
	defer l.Release()
	key := endpoints.Key{Address: wire.AddrFrom(a)}
	if err := c.Endpoints.Insert(key, v); !errors.Is(err, typed.ErrKeyExist) {
		return err
	}
	if err := c.Free(a, int(v.Ifindex)); err != nil {
		return err
	}
	return c.Endpoints.Put(key, v)
}

// Free returns nil when the address leads to nothing that exists but the link of that index, else a *TakenError.
func (c Claimer) Free(a netip.Addr, index int) error {
	other, err := c.Other(a, index)
	if err != nil || other == 0 {
		return err
	}
	return &TakenError{Address: a, Holder: c.Name(other)}
}

// Other is the index of the link that the address leads to, when it exists and is another than that of the index given;
// else 0.
func (c Claimer) Other(a netip.Addr, index int) (int, error) {
	v, err := c.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(a)})
	if errors.Is(err, typed.ErrKeyNotExist) || err == nil && int(v.Ifindex) == index {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	_, err = c.Host.LinkByIndex(int(v.Ifindex))
	switch {
	case errors.Is(err, device.ErrNotFound):
		return 0, nil
	case err != nil:
		return 0, err
	}
	return int(v.Ifindex), nil
}

// Name says in words whose link that is. It reads every state file.
func (c Claimer) Name(index int) string {
	list, _ := List(c.StateDir) // those that can't be read can't be named
	for _, e := range list {
		if e.HostIndex == index {
			return e.Name()
		}
	}
	l, err := c.Host.LinkByIndex(index)
	if err != nil {
		return fmt.Sprintf("link %d", index)
	}
	return fmt.Sprintf("link %s (index %d), of which no state file knows", l.Name, index)
}

// Name is the endpoint in words.
func (e Endpoint) Name() string {
	where := fmt.Sprintf("interface %s of container %s, link %s", e.IfName, e.ContainerID, e.HostName)
	if e.Pod == "" {
		return where
	}
	return fmt.Sprintf("pod %s (%s)", e.Pod, where)
}
