package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// mostQuestions is how many Ethernet addresses bridges are asked for at a time.
const mostQuestions = 1024

// mostAsking is how long they are asked at a time: the kernel answers in turn with whatever else changes links.
const mostAsking = 50 * time.Millisecond

// containerController owns what bridges of somebody else's have of ours: entries in the maps, programs, and the end of the flows of
// containers that have gone.
type containerController struct {
	*node
	attached map[int]string // the names of bridges that have our programs, by index
	lodgers  lodgers
	left     chan departures // of which one waits
}

// CheckBridge returns why no containers can be behind a bridge of that name; nil: they can, if there is one some day.
func CheckBridge(name string) error {
	if err := device.CheckName(name); err != nil {
		return fmt.Errorf("the name of a bridge %w: %q", err, name)
	}
	host, err := device.Open()
	if err != nil {
		return err
	}
	defer host.Close()
	l, err := host.LinkByName(name)
	if err == nil && l.Kind != device.KindBridge {
		return noBridge(l)
	}
	return nil
}

func noBridge(l device.Link) error {
	return fmt.Errorf("%s is no bridge (but of kind %s): --attach-bridge takes bridges alone", l.Name, l.Kind)
}

func newContainers(n *node) *containerController {
	return &containerController{node: n, attached: map[int]string{}, left: make(chan departures, 1)}
}

func (c *containerController) entries() (typed.Sync[bridges.Key, bridges.Value], error) {
	have, err := c.dp.Maps.Bridges.Content()
	return typed.Sync[bridges.Key, bridges.Value]{Map: c.dp.Maps.Bridges, Have: have}, err
}

// attach puts the programs onto bridges. Each has entries in the map for as long as programs may be on it, however this process
// ends: by that they are found again.
func (c *containerController) attach(s *state) error {
	c.complaints.noteEach("bridges/", c.missing(s))
	if len(s.plan.Bridges) == 0 {
		return nil
	}
	entries, err := c.entries()
	if err == nil {
		err = entries.Add(s.plan.Bridges)
	}
	errs := []error{err}
	for index, name := range c.wanted(s) {
		err := c.attachTo(index)
		switch _, gone := c.host.LinkByIndex(index); {
		case gone != nil: // of which the kernel notifies us
		case err != nil:
			errs = append(errs, fmt.Errorf("bridge %s: %w", name, err))
		case c.attached[index] == "":
			c.attached[index] = name
			c.log.Info("containers behind a bridge are carried", "bridge", name, "ifindex", index)
		}
	}
	return errors.Join(errs...)
}

func (c *containerController) attachTo(index int) error {
	if _, err := c.holdWorld(); err != nil { // what comes for addresses that no container has costs an allowance
		return err
	}
	err := c.dp.Maps.Devices.Insert(devices.Key{Ifindex: uint32(index)}, devices.Value{})
	if err != nil && !errors.Is(err, typed.ErrKeyExist) {
		return err
	}
	for _, hook := range c.hooks() {
		if err := c.dp.Attach(index, hook); err != nil {
			return err
		}
	}
	return nil
}

// hooks are those of a bridge: a pod's.
func (c *containerController) hooks() []attach.Hook {
	if c.frontends() {
		return attach.PodHooks()
	}
	return []attach.Hook{attach.FromPod}
}

// wanted are the bridges that are to have our programs, by index.
func (c *containerController) wanted(s *state) map[int]string {
	wanted := map[int]string{}
	for _, b := range s.view.bridges {
		if len(b.Within(s.plan.Standing.Own)) > 0 {
			wanted[int(b.Index)] = b.Name
		}
	}
	return wanted
}

// missing says of each bridge that was named, and is not carried, why not.
func (c *containerController) missing(s *state) map[string]error {
	why := map[string]error{}
	for _, name := range c.cfg.Bridges {
		why[name] = fmt.Errorf("there is no bridge %s yet, or it is down; its containers are carried as soon as it is up", name)
	}
	for _, l := range s.view.links {
		if why[l.Name] != nil && l.Kind != device.KindBridge {
			why[l.Name] = noBridge(l)
		}
	}
	for _, b := range s.view.bridges {
		why[b.Name] = nil
		if own := s.plan.Standing.Own; len(own) > 0 && len(b.Within(own)) == 0 {
			why[b.Name] = fmt.Errorf("bridge %s has no address with a subnet within this node's podCIDR (%s), so its containers are not carried; give it one, as Docker's --bip does",
				b.Name, listOf(own))
		}
	}
	return why
}

// detach takes the programs off bridges that are gone, or are not to have them, those of an earlier run included, and ends what
// containers have left.
func (c *containerController) detach(s *state) error {
	entries, err := c.entries()
	if err != nil {
		return err
	}
	wanted, errs := c.wanted(s), []error{}
	others := map[int]bool{}
	for _, v := range entries.Have {
		if index := int(v.Ifindex); index != devices.World && wanted[index] == "" {
			others[index] = true
		}
	}
	for index := range others {
		c.log.Info("containers behind a bridge are no longer carried", "bridge", c.attached[index], "ifindex", index)
		delete(c.attached, index)
		errs = append(errs, c.dp.DetachBridge(index), c.dp.Maps.Devices.Delete(devices.Key{Ifindex: uint32(index)}))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return errors.Join(entries.Remove(func(k bridges.Key, _ bridges.Value) bool { _, stays := s.plan.Bridges[k]; return stays }), c.follow(s, s.view.links))
}

// inspect attaches again what has been taken off a bridge, and looks who has come behind it: nothing tells, and with a container a
// bridge may forget all neighbours.
func (c *containerController) inspect(s *state) error {
	errs := []error{c.follow(s, nil)} // which ports have gone, a look at the network says
	for index, name := range c.attached {
		for _, hook := range c.hooks() {
			errs = append(errs, c.attachAgain(index, name, hook, repairedBridge))
		}
	}
	return errors.Join(errs...)
}

// follow looks at who is behind the bridges, and hands over who has gone.
func (c *containerController) follow(s *state, links map[int]device.Link) error {
	if len(c.attached) == 0 {
		return nil
	}
	var found []device.Neighbour
	for index := range c.attached {
		neighbours, err := c.host.Neighbours(index)
		if err != nil {
			return err
		}
		found = append(found, neighbours...)
	}
	behind := func(n device.Neighbour) bool {
		return len(n.MAC) > 0 && !n.Permanent && plan.Contains(s.plan.Standing.Own, n.Addr)
	}
	found = slices.DeleteFunc(found, func(n device.Neighbour) bool { return !behind(n) })
	where, err := c.stations(found) // after the neighbours: a bridge learns first
	if err != nil {
		return err
	}
	crowded := len(c.lodgers.crowded)
	left := c.lodgers.look(found, where, links)
	if len(c.lodgers.crowded) > crowded {
		c.log.Warn("a port of a bridge has more addresses behind it than are remembered: when it goes, so do the bridge's flows that are not of known containers",
			"remembered", mostAddresses)
	}
	if left.empty() {
		return nil
	}
	c.log.Debug("containers have left their addresses", "addresses", len(left.addresses), "bridges", len(left.bridges))
	select {
	case waiting := <-c.left:
		left = waiting.and(left)
	default:
	}
	c.left <- left // nobody else sends, so there is room
	return nil
}

// stations asks the bridges behind which ports neighbours are. A container can have as many Ethernet addresses as it likes, so only
// so many are asked for, and for so long, in a map's order, which is another one each time.
func (c *containerController) stations(neighbours []device.Neighbour) (map[station]int, error) {
	all := map[station]bool{}
	for _, n := range neighbours {
		all[station{n.Index, string(n.MAC)}] = true
	}
	where, began := map[station]int{}, time.Now()
	for s := range all {
		if len(where) == mostQuestions || time.Since(began) > mostAsking {
			break
		}
		port, err := c.host.BridgePort(s.bridge, net.HardwareAddr(s.mac))
		if err != nil {
			return nil, err
		}
		where[s] = port
	}
	return where, nil
}

// run ends the flows of containers that have left, until ctx ends. What fails is tried again. It rests for as long as it has worked:
// a container can make departures up.
func (c *containerController) run(ctx context.Context) error {
	for left := (departures{}); ; {
		if left.empty() {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case left = <-c.left:
			}
		}
		began := time.Now()
		err := c.dp.EndFlows(left.include)
		c.complaints.note("flows/of former containers", err)
		rest := time.Since(began)
		if err == nil {
			left = departures{}
		} else {
			rest += retry
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(rest):
		}
	}
}
