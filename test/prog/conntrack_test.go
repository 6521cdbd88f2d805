package prog

import (
	"encoding/binary"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Attributes of ctnetlink (include/uapi/linux/netfilter/nfnetlink_conntrack.h) that x/sys and netlink lack.
const (
	ctaNATSource      = 6
	ctaNATDestination = 13
	ctaNATProto       = 3
	ctaNATPortMin     = 1
	ctaNATPortMax     = 2
)

// netfilterKnows puts a flow into netfilter's table: as it is, by its opener's tuple.
func (b *bed) netfilterKnows(flow wire.Tuple) { b.Helper(); b.netfilterTranslates(flow, 0, "", 0) }

// netfilterTranslates puts a flow into netfilter's table whose source or destination becomes another, as DNAT does for a
// Service; change is the attribute that says which.
func (b *bed) netfilterTranslates(flow wire.Tuple, change int, to string, port uint16) {
	b.Helper()
	if change == 0 {
		b.netfilterHas(flow, 0)
		return
	}
	b.netfilterHas(flow, 0, translation{change, to, port})
}

// translation is one end's of a flow in netfilter's table: the attribute that says which, and what it becomes.
type translation struct {
	change int
	to     string
	port   uint16
}

// The status there of a flow that has been answered: IPS_SEEN_REPLY, with IPS_CONFIRMED, which every entry has; and of one
// that has been answered for a while: IPS_ASSURED.
const (
	seenReply = 2 | 8
	assured   = seenReply | 4
)

// The states there of TCP connections (include/uapi/linux/netfilter/nf_conntrack_tcp.h).
const (
	tcpSynSent     = 1
	tcpEstablished = 3
	tcpFinWait     = 4
)

// netfilterHas puts a flow into netfilter's table, with a status unless 0.
func (b *bed) netfilterHas(flow wire.Tuple, status uint32, translations ...translation) {
	b.Helper()
	b.netfilterHasAt(0, flow, status, translations...)
}

// netfilterHasAt does so with a state of TCP, unless 0.
func (b *bed) netfilterHasAt(state uint8, flow wire.Tuple, status uint32, translations ...translation) {
	b.Helper()
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: each[uint8](b.family, unix.AF_INET, unix.AF_INET6), Version: nl.NFNETLINK_V0})
	reply := flow
	reply.Src, reply.Dst, reply.Sport, reply.Dport = flow.Dst, flow.Src, flow.Dport, flow.Sport
	req.AddData(b.netfilterTuple(nl.CTA_TUPLE_ORIG, flow))
	req.AddData(b.netfilterTuple(nl.CTA_TUPLE_REPLY, reply))
	req.AddData(nl.NewRtAttr(nl.CTA_TIMEOUT, binary.BigEndian.AppendUint32(nil, 120)))
	if status != 0 {
		req.AddData(nl.NewRtAttr(nl.CTA_STATUS, binary.BigEndian.AppendUint32(nil, status)))
	}
	if state != 0 {
		info := nl.NewRtAttr(nl.CTA_PROTOINFO|unix.NLA_F_NESTED, nil)
		info.AddRtAttr(nl.CTA_PROTOINFO_TCP|unix.NLA_F_NESTED, nil).AddRtAttr(nl.CTA_PROTOINFO_TCP_STATE, []byte{state})
		req.AddData(info)
	}
	for _, t := range translations {
		nat := nl.NewRtAttr(t.change|unix.NLA_F_NESTED, nil)
		minIP := each(b.family, 1, 4) // CTA_NAT_V4_MINIP, CTA_NAT_V6_MINIP
		nat.AddRtAttr(minIP, b.netIP(t.to))
		proto := nat.AddRtAttr(ctaNATProto|unix.NLA_F_NESTED, nil)
		proto.AddRtAttr(ctaNATPortMin, binary.BigEndian.AppendUint16(nil, t.port))
		proto.AddRtAttr(ctaNATPortMax, binary.BigEndian.AppendUint16(nil, t.port))
		req.AddData(nat)
	}
	_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	must(b, err)
}

func (f family) netfilterTuple(kind int, t wire.Tuple) *nl.RtAttr {
	tuple := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
	ip := tuple.AddRtAttr(nl.CTA_TUPLE_IP|unix.NLA_F_NESTED, nil)
	ip.AddRtAttr(each(f, nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC), t.Src.Netip().AsSlice())
	ip.AddRtAttr(each(f, nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST), t.Dst.Netip().AsSlice())
	proto := tuple.AddRtAttr(nl.CTA_TUPLE_PROTO|unix.NLA_F_NESTED, nil)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{byte(t.Proto)})
	proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, t.Sport[:])
	proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, t.Dport[:])
	return tuple
}
