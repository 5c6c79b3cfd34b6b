"""Where low precision enters, what it flips, and the certificate of every flip.

`stages` names the places and carries exact policies through them: rounding where a number is
*stored* (`pdverify.formats`, with torch's `casts` as its second witness) and where the mask is
*computed* (`numbers`: arithmetic that rounds every step and carries its error; `forms`: the
formulas of D and C on such numbers; `evaluate`: both, on rows).  `noise` bounds how far D and C
move within what storing lost.  From both, `certify` tells decisions that are determined from those
that may flip, and `study` makes the table, in `records`.
"""
