package device

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vishvananda/netlink/nl"
)

// EventKind is what an Event is about.
type EventKind uint8

// The kinds.
const (
	// Lost says that events may have been lost, so that anything may have changed.
	Lost EventKind = iota
	LinkEvent
	AddressEvent
	RouteEvent
	// RuleEvent is a change of a rule that chooses a routing table.
	RuleEvent
	// SettingEvent is a change of a sysctl of an interface, such as rp_filter.
	SettingEvent
	// FilterEvent is a change of a queueing discipline or of one of its filters.
	FilterEvent
	// PolicyEvent is a change of an IPsec policy.
	PolicyEvent
)

// Event is a change of the network, as the kernel tells it.
type Event struct {
	Kind EventKind
	// Gone says that what it is about was deleted, else it is new or was changed.
	Gone bool
	// Index is that of the interface of a FilterEvent.
	Index int
	// Family is that of a RuleEvent or a SettingEvent.
	Family int
	// Link, Address, Route and Settings are what such an event is about. A route's Table is 0 for the main table, and
	// settings that have not changed are Untold.
	Link     Link
	Address  Address
	Route    Route
	Settings Settings
}

// receiveBuffer is how many bytes of events may wait: tens of thousands.
const receiveBuffer = 4 << 20

// gatherTime is how long events gather once all that waited have been heard. A thousand a second would wake the process as often.
const gatherTime = 5 * time.Millisecond

// Watch calls hear for every change of links, addresses, routes, rules, filters and the settings of links in the
// namespace of the calling goroutine's thread, until ctx ends. The first event is Lost: nobody has told of what changed
// before the subscription stood.
func Watch(ctx context.Context, hear func(Event)) error {
	return watch(ctx, hear, "network", unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_TC)
}

func watch(ctx context.Context, hear func(Event), what string, family int, groups ...int) error {
	f, err := subscribe(what, family, groups...)
	if err != nil {
		return fmt.Errorf("subscribe to changes (%s): %w", what, err)
	}
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { _ = f.Close() }) // ends a read that waits
	defer stop()
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("receive changes (%s): %w", what, err)
	}
	hear(Event{Kind: Lost})
	buffer := make([]byte, nl.RECEIVE_BUFFER_SIZE)
	// The kernel tells of a loss at once, and then loses everything until what waits has been read.
	lost, heard := false, false
	for ctx.Err() == nil {
		var n int
		var received error
		err := raw.Read(func(fd uintptr) bool {
			n, _, received = unix.Recvfrom(int(fd), buffer, 0)
			if received == unix.EAGAIN && lost {
				lost = false
				hear(Event{Kind: Lost})
			}
			return heard || !errors.Is(received, unix.EAGAIN)
		})
		switch err = errors.Join(err, received); {
		case err == nil:
			decodeEvents(buffer[:n], family, hear)
			heard = true
		case errors.Is(err, unix.EAGAIN):
			heard = false
			time.Sleep(gatherTime)
		case errors.Is(err, unix.ENOBUFS):
			lost = true
			hear(Event{Kind: Lost})
		case interrupted(err):
		case ctx.Err() != nil:
			return ctx.Err()
		default:
			return fmt.Errorf("receive changes (%s): %w", what, err)
		}
	}
	return ctx.Err()
}

// subscribe opens a socket that gets the messages of groups.
func subscribe(name string, family int, groups ...int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, family)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	// More than the default takes a capability in the first namespace; without it the kernel's limit applies.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); err != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, g := range groups {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g)
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// decodeEvents reads the messages of one datagram. What cannot be read may mean anything.
func decodeEvents(b []byte, family int, hear func(Event)) {
	for len(b) >= unix.SizeofNlMsghdr {
		length := int(native.Uint32(b))
		if length < unix.SizeofNlMsghdr || length > len(b) {
			hear(Event{Kind: Lost})
			return
		}
		if family == unix.NETLINK_XFRM {
			hear(Event{Kind: PolicyEvent})
		} else if e, ok := decodeEvent(native.Uint16(b[4:]), b[unix.SizeofNlMsghdr:length]); ok {
			hear(e)
		}
		b = b[min(len(b), (length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
	}
}

func decodeEvent(kind uint16, m []byte) (e Event, ok bool) {
	switch kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		e = Event{Kind: LinkEvent, Gone: kind == unix.RTM_DELLINK}
		e.Link, ok = decodeLink(m)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		e = Event{Kind: AddressEvent, Gone: kind == unix.RTM_DELADDR}
		e.Address, ok = decodeAddress(m)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		e = Event{Kind: RouteEvent, Gone: kind == unix.RTM_DELROUTE}
		e.Route, _, ok = decodeRoute(m)
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		return Event{Kind: RuleEvent, Gone: kind == unix.RTM_DELRULE, Family: familyOfMessage(m)}, true
	case unix.RTM_NEWNETCONF:
		e = Event{Kind: SettingEvent, Family: familyOfMessage(m)}
		e.Settings, ok = decodeSettings(m)
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
		const index = 4 // in struct tcmsg
		gone := kind == unix.RTM_DELQDISC || kind == unix.RTM_DELTFILTER
		return Event{Kind: FilterEvent, Gone: gone, Index: number(m[min(len(m), index):])}, true
	}
	return e, ok
}

// familyOfMessage is the first byte of struct fib_rule_hdr and of struct netconfmsg; 0: there is none.
func familyOfMessage(m []byte) int {
	if len(m) == 0 {
		return 0
	}
	return int(m[0])
}
