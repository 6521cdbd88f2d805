/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The enums of the records, for the object's BTF: the compiler leaves out what no
 * member and no parameter mentions, and the test that compares the records with
 * their Go types looks for them there.
 */
#ifndef EC_LIB_ENUMS_H
#define EC_LIB_ENUMS_H

#include "bpf/lib/maps.h"

union record_enums {
	enum layout layout;
	enum config_flags config_flags;
	enum destination_flags destination_flags;
	enum drop_reason drop_reason;
	enum drop_layout drop_layout;
	enum flow_state flow_state;
	enum fragments_holder fragments_holder;
	enum fragments_layout fragments_layout;
	enum ports_layout ports_layout;
	enum snat_flags snat_flags;
	enum traffic_event traffic_event;
	enum traffic_layout traffic_layout;
	enum usage_table usage_table;
};

/* No program calls it, so it is not loaded. */
__attribute__((used)) static void record_enums_in_btf(union record_enums *enums)
{
}

#endif
