package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The attributes and bits of netfilter's connection table that are used here:
// enum ctattr_type and enum ip_conntrack_status.
const (
	getConntrack        = 1 // IPCTNL_MSG_CT_GET
	conntrackOpener     = 1 // CTA_TUPLE_ORIG
	conntrackReplies    = 2 // CTA_TUPLE_REPLY
	conntrackAddresses  = 1 // CTA_TUPLE_IP: nothing but addresses is in it
	conntrackStatus     = 3 // CTA_STATUS
	conntrackStatusMask = 26
	sourceTranslated    = 1 << 4 // IPS_SRC_NAT
	targetTranslated    = 1 << 5 // IPS_DST_NAT
)

// translatedFlows says whether netfilter's connection table has flows whose addresses it changes: Translates, if one has a
// pod's. The kernel filters out the others.
func translatedFlows(around *Surroundings) (level Level, err error) {
	for _, family := range around.Families {
		found, err := translatedFlowsOf(uint8(family), around)
		if level = max(level, found); level == Translates || err != nil {
			return level, err
		}
	}
	return level, nil
}

func translatedFlowsOf(family uint8, around *Surroundings) (level Level, err error) {
	for _, bit := range []uint32{sourceTranslated, targetTranslated} {
		wanted := binary.BigEndian.AppendUint32(nil, bit)
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|getConntrack, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
		req.AddData(nl.NewRtAttr(conntrackStatus, wanted))
		req.AddData(nl.NewRtAttr(conntrackStatusMask, wanted))
		err := req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(m []byte) bool {
			level = max(level, flowLevel(m, around))
			return level < Translates
		})
		if level == Translates {
			return level, nil
		}
		if err != nil && !errors.Is(err, unix.EINVAL) { // a kernel without that table
			return level, fmt.Errorf("list translated flows: %w", err)
		}
	}
	return level, nil
}

// flowLevel says whether one of a flow's addresses is a pod's, as its opener or its replies have it.
func flowLevel(m []byte, around *Surroundings) Level {
	all := attributes(m)
	for _, direction := range []uint16{conntrackOpener, conntrackReplies} {
		for _, raw := range nested(nested(all[direction])[conntrackAddresses]) {
			if a, ok := netip.AddrFromSlice(raw); !ok || !around.noPods(netip.PrefixFrom(a, a.BitLen())) {
				return Translates
			}
		}
	}
	return Masquerades
}

// tracksConnections says whether the kernel has a connection table. Without one there is nothing to translate with.
func tracksConnections() bool {
	_, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max")
	return !errors.Is(err, fs.ErrNotExist)
}
