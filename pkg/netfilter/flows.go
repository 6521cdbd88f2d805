package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The attributes and bits of netfilter's connection table that are used here:
// enum ctattr_type and enum ip_conntrack_status.
const (
	getConntrack        = 1 // IPCTNL_MSG_CT_GET
	conntrackStatus     = 3 // CTA_STATUS
	conntrackStatusMask = 26
	sourceTranslated    = 1 << 4 // IPS_SRC_NAT
	targetTranslated    = 1 << 5 // IPS_DST_NAT
)

// translatedFlows says whether netfilter's connection table has any flow of these families whose
// addresses it changes. The kernel filters out the others.
func translatedFlows(families []uint8) (bool, error) {
	for _, family := range families {
		if found, err := translatedFlowsOf(family); found || err != nil {
			return found, err
		}
	}
	return false, nil
}

func translatedFlowsOf(family uint8) (bool, error) {
	for _, bit := range []uint32{sourceTranslated, targetTranslated} {
		wanted := binary.BigEndian.AppendUint32(nil, bit)
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|getConntrack, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
		req.AddData(nl.NewRtAttr(conntrackStatus, wanted))
		req.AddData(nl.NewRtAttr(conntrackStatusMask, wanted))
		found := false
		err := req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func([]byte) bool { found = true; return false })
		if found {
			return true, nil
		}
		if err != nil && !errors.Is(err, unix.EINVAL) { // a kernel without that table
			return false, fmt.Errorf("list translated flows: %w", err)
		}
	}
	return false, nil
}

// tracksConnections says whether the kernel has a connection table. Without one there is nothing to translate with.
func tracksConnections() bool {
	_, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max")
	return !errors.Is(err, fs.ErrNotExist)
}
